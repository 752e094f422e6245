//! A slot's state as bytes: the head says what it holds and where it can be gone back to, the body is the state, its
//! checkpoints and what the MTP cache still has to read.

use super::super::draft::MtpFeed;
use super::super::held::Held;
use super::super::slot::Slot;
use super::super::target::Target;
use super::bytes::{Cursor, Truncated, put_blob, put_floats, put_number};
use super::{Kept, Point, reusable};

/// What a saved state holds.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Head {
    pub(crate) held: Held,
    pub(crate) points: Vec<Point>,
}

impl Head {
    pub(crate) fn of<T: Target>(slot: &Slot<T>) -> Head {
        let live = Point { rows: slot.held.len(), has_logits: false };
        Head { held: slot.held.clone(), points: slot.checkpoints.points().chain([live]).collect() }
    }

    /// The most first rows of `prompt` that this state serves.
    pub(crate) fn reusable(&self, prompt: &Held) -> usize {
        reusable(self.points.iter().copied(), self.held.common_start(prompt), prompt.len())
    }

    /// Whether everything `other` serves is served by this as well.
    pub(crate) fn covers(&self, other: &Head) -> bool {
        other
            .points
            .iter()
            .all(|point| self.points.iter().any(|mine| mine.rows == point.rows && mine.has_logits >= point.has_logits))
            && self.held.common_start(&other.held) == other.held.len()
    }

    pub(crate) fn write(&self, to: &mut Vec<u8>) {
        put_number(to, self.held.len());
        self.held.tokens().iter().for_each(|token| to.extend_from_slice(&token.to_le_bytes()));
        put_number(to, self.held.spans().len());
        for span in self.held.spans() {
            put_number(to, span.start);
            to.extend_from_slice(&span.grid.0.to_le_bytes());
            to.extend_from_slice(&span.grid.1.to_le_bytes());
            to.extend_from_slice(&span.key);
        }
        put_number(to, self.points.len());
        for point in &self.points {
            put_number(to, point.rows);
            to.push(u8::from(point.has_logits));
        }
    }

    pub(crate) fn read(from: &mut Cursor<'_>) -> Result<Head, Truncated> {
        let tokens = from.words(u32::from_le_bytes)?;
        let mut held = Held::default();
        let count = from.number()?;
        for _ in 0..count {
            let start = from.number()?;
            let grid = (from.u32()?, from.u32()?);
            let key = *from.take(32)?.first_chunk::<32>().ok_or(Truncated)?;
            if start < held.len()
                || start >= tokens.len()
                || u64::from(grid.0) * u64::from(grid.1) > u64::from(u32::MAX)
            {
                return Err(Truncated);
            }
            tokens[held.len()..start].iter().for_each(|&token| held.push(token));
            held.push_span(grid, key);
        }
        let known = held.len().min(tokens.len());
        tokens[known..].iter().for_each(|&token| held.push(token));
        held.truncate(tokens.len());
        let count = from.number()?;
        let mut points = Vec::new();
        for _ in 0..count {
            points.push(Point { rows: from.number()?, has_logits: from.byte()? != 0 });
        }
        Ok(Head { held, points })
    }
}

/// The body of a slot's state.
pub(crate) fn write_body<T: Target>(target: &T, slot: &Slot<T>) -> std::io::Result<Vec<u8>> {
    let mut body = Vec::new();
    put_blob(&mut body, |to| target.save(&slot.state, to))?;
    put_number(&mut body, slot.checkpoints.len());
    for kept in slot.checkpoints.list() {
        put_number(&mut body, kept.rows);
        body.push(u8::from(kept.at_turn));
        put_floats(&mut body, &kept.hidden);
        put_floats(&mut body, kept.logits.as_deref().unwrap_or_default());
        put_blob(&mut body, |to| target.save_checkpoint(&kept.state, to))?;
    }
    match &slot.feed {
        None => body.push(0),
        Some(feed) => {
            body.push(1);
            let (first, waiting) = feed.parts();
            put_number(&mut body, first);
            put_floats(&mut body, waiting);
        }
    }
    Ok(body)
}

/// Puts a saved state into a slot. On an error the slot must be reset.
pub(crate) fn read_body<T: Target>(target: &T, head: &Head, body: &[u8], slot: &mut Slot<T>) -> Result<(), String> {
    let cut = |Truncated| "it ends too early".to_string();
    let mut from = Cursor::new(body);
    target.load(&mut slot.state, &mut from.blob().map_err(cut)?)?;
    if T::rows(&slot.state) != head.held.len() {
        return Err(format!("the state has {} rows, its list of tokens {}", T::rows(&slot.state), head.held.len()));
    }
    let mut list = Vec::new();
    for _ in 0..from.number().map_err(cut)? {
        let rows = from.number().map_err(cut)?;
        let at_turn = from.byte().map_err(cut)? != 0;
        let hidden = from.words(f32::from_le_bytes).map_err(cut)?;
        let logits = from.words(f32::from_le_bytes).map_err(cut)?;
        let logits = (logits.len() == target.vocab()).then(|| logits.into());
        let state = target.load_checkpoint(&mut from.blob().map_err(cut)?)?;
        list.push(Kept { rows, state, hidden: hidden.into(), logits, at_turn });
    }
    let feed = match from.byte().map_err(cut)? {
        0 => None,
        _ => {
            let first = from.number().map_err(cut)?;
            Some(MtpFeed::from_parts(target.hidden(), first, from.words(f32::from_le_bytes).map_err(cut)?))
        }
    };
    if !from.is_empty() {
        return Err("it is longer than its contents".into());
    }
    slot.held = head.held.clone();
    slot.checkpoints.set(list);
    if let Some(own) = &mut slot.feed {
        *own = feed.unwrap_or_else(|| MtpFeed::from_parts(target.hidden(), T::mtp_rows(&slot.state), Vec::new()));
        T::truncate_mtp(&mut slot.state, own.first());
    }
    if let Some(ngrams) = &mut slot.ngrams {
        ngrams.truncate(0);
    }
    Ok(())
}
