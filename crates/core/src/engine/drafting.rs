//! Proposing: asks every drafter what it has, lets the policy say how many, and runs the MTP head for all slots together.

use std::time::{Duration, Instant};

use super::core::Core;
use super::decoding::Share;
use super::draft::{Level, Offer, Source, implausible};
use super::held::PICTURE;
use super::job::Job;
use super::options::{MAX_MTP_DEPTH, MtpSetting};
use super::sampler::{lead, probability};
use super::slot::Slot;
use super::target::Target;
use crate::model::{MtpRow, RowInput};

/// Waiting MTP rows that a draft step takes along without being any dearer.
const USUAL_BACKLOG: usize = 8;

/// A slot in a chain of MTP drafts.
struct Chain {
    /// Its place in the window.
    part: usize,
    slot: usize,
    depth: usize,
    /// The depth was asked for: drafts then look at the whole vocabulary.
    fixed: bool,
    /// Chance that all its drafts are accepted, where each draft is judged by the head's confidence.
    chance: Option<f64>,
    /// The head's hidden row of the newest draft.
    hidden: Vec<f32>,
    open: bool,
}

impl<T: Target> Core<T> {
    /// Fills `drafts` with what each slot of the next window proposes.
    pub(crate) fn propose(&mut self, shares: &mut [Share]) -> Result<(), String> {
        self.drafts.resize_with(shares.len().max(self.drafts.len()), Vec::new);
        self.drafts.truncate(shares.len());
        self.drafts.iter_mut().for_each(Vec::clear);
        self.confidences.resize_with(shares.len(), Vec::new);
        self.confidences.iter_mut().for_each(Vec::clear);
        for share in shares.iter_mut() {
            share.row = self.slots[share.slot].held.len();
        }
        let drafts_at_all = self.options.mtp != MtpSetting::Off
            || self.options.ngram.is_some()
            || self.options.custom_drafter.is_some();
        self.depths.clear();
        self.depths.resize(shares.len(), 0);
        if !drafts_at_all || (shares.len() > 1 && !self.options.batch_mtp) {
            return Ok(());
        }
        let most_rows = self.options.max_window - shares.len();
        if most_rows == 0 {
            return Ok(());
        }
        // Looked-up tokens first: they cost nothing, and the policy needs to know how many there are.
        for (share, drafts) in shares.iter_mut().zip(&mut self.drafts) {
            let slot = &mut self.slots[share.slot];
            let Some(job) = &slot.job else { continue };
            let room = room(job, share.row, self.options.ctx).min(most_rows);
            if room == 0 || job.suspect || job.mtp == Some(MtpSetting::Off) {
                continue;
            }
            let has_head = slot.feed.as_ref().is_some_and(|feed| feed.ready() > 0);
            let next = job.token(share.row);
            if let Some(drafter) = &self.options.custom_drafter {
                share.source = Source::Custom;
                slot.held.with_next(next, |tokens| drafter.propose(tokens, room, drafts));
                drafts.truncate(room);
                let vocab = self.target.vocab();
                let valid = drafts.iter().take_while(|&&token| (token as usize) < vocab).count();
                drafts.truncate(valid);
            } else if let Some(ngrams) = &mut slot.ngrams {
                let options = *ngrams.options();
                slot.held.with_next(next, |tokens| {
                    let Some(found) = ngrams.find(tokens) else { return };
                    if has_head && found.length < options.long_match {
                        return;
                    }
                    // Past the end of what is known the proposal repeats itself.
                    for index in 0..room.min(options.max_draft) {
                        let token = tokens
                            .get(found.at + index)
                            .copied()
                            .unwrap_or_else(|| drafts[found.at + index - tokens.len()]);
                        if token == PICTURE {
                            return;
                        }
                        drafts.push(token);
                    }
                });
                share.source = if drafts.is_empty() { Source::Mtp } else { Source::Ngram };
            }
        }
        self.choose_depths(shares, most_rows);
        self.draft_with_head(shares)
    }

    fn choose_depths(&mut self, shares: &[Share], most_rows: usize) {
        let engine_setting = self.options.mtp;
        let offers = shares.iter().zip(&self.drafts).map(|(share, drafts)| {
            let slot = &self.slots[share.slot];
            offer(slot, share, drafts.len(), most_rows, engine_setting, self.options.ctx)
        });
        let offers: Vec<Offer<'_>> = offers.collect();
        self.policy.plan(&offers, &mut self.depths);
        for (drafts, &depth) in self.drafts.iter_mut().zip(&self.depths) {
            drafts.truncate(depth);
        }
    }

    /// Runs the MTP head for the slots that draft with it: first what their caches lack together with the next token, then draft
    /// after draft.
    fn draft_with_head(&mut self, shares: &[Share]) -> Result<(), String> {
        let mut chains: Vec<Chain> = Vec::new();
        for (part, (share, &depth)) in shares.iter().zip(&self.depths).enumerate() {
            if share.source == Source::Mtp && depth > 0 {
                let asked = self.slots[share.slot].job.as_ref().and_then(|job| job.mtp).unwrap_or(self.options.mtp);
                let fixed = asked != MtpSetting::Auto;
                // Alone, a chain goes on for as long as the head is sure enough.
                let judged = !fixed && shares.len() == 1;
                let depth = if judged { self.most_drafts(share) } else { depth };
                let chance = judged.then_some(1.0);
                chains.push(Chain { part, slot: share.slot, depth, fixed, chance, hidden: Vec::new(), open: true });
            }
        }
        if chains.is_empty() {
            return Ok(());
        }
        for chain in &chains {
            if self.slots[chain.slot].feed.as_ref().is_some_and(|feed| feed.ready() > USUAL_BACKLOG) {
                self.catch_up(chain.slot)?;
            }
        }
        let chosen = if chains.iter().any(|chain| chain.fixed) { None } else { self.policy.vocabulary.limit() };
        let limit = self.options.draft_vocab.or(chosen);
        let deepest = chains.iter().map(|chain| chain.depth).max().unwrap_or(0);
        for level in 0..deepest {
            let open = chains.iter().filter(|chain| chain.open).count();
            if open == 0 {
                break;
            }
            let started = Instant::now();
            self.draft_step(&mut chains, level, limit)?;
            self.policy.observe_step(open, limit, started.elapsed().as_secs_f64());
        }
        for chain in &chains {
            let slot = &mut self.slots[chain.slot];
            if let Some(feed) = &slot.feed {
                // The rows of drafts were computed from the head's own hidden rows; the trunk's replace them.
                T::truncate_mtp(&mut slot.state, feed.first());
            }
        }
        Ok(())
    }

    /// Most drafts of a slot that is alone in the window.
    fn most_drafts(&self, share: &Share) -> usize {
        let job = self.slots[share.slot].job.as_ref();
        let room = job.map_or(0, |job| room(job, share.row, self.options.ctx));
        room.min(MAX_MTP_DEPTH).min(self.options.max_window - 1)
    }

    /// One more draft for every open chain, from the first `limit` tokens.
    fn draft_step(&mut self, chains: &mut [Chain], level: usize, limit: Option<usize>) -> Result<(), String> {
        let mut rows: Vec<MtpRow<'_>> = Vec::new();
        let mut states: Vec<&mut T::State> = Vec::new();
        // Index of each open chain's last row.
        let mut last_rows: Vec<usize> = Vec::new();
        let mut open = chains.iter().filter(|chain| chain.open).peekable();
        for slot in &mut self.slots {
            let Some(chain) = open.next_if(|chain| chain.slot == slot.index) else { continue };
            let (Some(job), Some(feed)) = (&slot.job, &slot.feed) else {
                return Err("a slot without a request drafts".into());
            };
            let part = states.len() as u32;
            if level == 0 {
                let ready = feed.ready();
                for index in 0..ready {
                    let row = feed.first() + index;
                    rows.push(MtpRow {
                        slot: part,
                        input: job.input(row),
                        hidden: feed.hidden(index),
                        position: job.position(row),
                        want_logits: index + 1 == ready,
                    });
                }
            } else {
                let drafts = &self.drafts[chain.part];
                rows.push(MtpRow {
                    slot: part,
                    input: RowInput::Token(drafts[level - 1]),
                    hidden: &chain.hidden,
                    position: job.position(feed.first() + level - 1),
                    want_logits: true,
                });
            }
            last_rows.push(rows.len() - 1);
            states.push(&mut slot.state);
        }
        self.target.mtp_forward(&rows, &mut states, &mut self.draft_out, limit)?;
        drop(rows);
        drop(states);
        let width = self.target.hidden();
        let head = self.draft_out.logits.len() / last_rows.len();
        let finished = chains.iter_mut().filter(|chain| chain.open).zip(last_rows).enumerate();
        for (index, (chain, last_row)) in finished {
            if level == 0
                && let Some(feed) = &mut self.slots[chain.slot].feed
            {
                feed.consumed(feed.ready());
            }
            let logits = &mut self.draft_out.logits[index * head..(index + 1) * head];
            let slot = &mut self.slots[chain.slot];
            let Some(token) = slot.job.as_mut().and_then(|job| job.guess(logits, level)) else {
                chain.open = false;
                continue;
            };
            if self.options.draft_p_min > 0.0 && probability(logits, token) < f64::from(self.options.draft_p_min) {
                chain.open = false;
                continue;
            }
            if let Some(chance) = &mut chain.chance {
                let level = Level::of(lead(logits, token));
                *chance *= self.policy.confidence(level);
                if !self.policy.keeps(1 + self.drafts[chain.part].len(), *chance) {
                    chain.open = false;
                    self.ended_unsure += 1;
                    continue;
                }
                self.confidences[chain.part].push(level);
            }
            self.drafts[chain.part].push(token);
            let rows = 1 + self.drafts[chain.part].len();
            let worthy = chain.chance.is_none_or(|chance| self.policy.goes_on(rows, level + 1, chance));
            chain.open = worthy && level + 1 < chain.depth;
            self.ended_unsure += u64::from(!worthy && level + 1 < chain.depth);
            if chain.open {
                chain.hidden.clear();
                chain.hidden.extend_from_slice(&self.draft_out.hidden[last_row * width..(last_row + 1) * width]);
            }
        }
        Ok(())
    }

    /// Reads what a slot's MTP cache lacks, up to the slot's last row.
    pub(crate) fn catch_up(&mut self, index: usize) -> Result<(), String> {
        let started = Instant::now();
        let mut read = 0;
        loop {
            let slot = &mut self.slots[index];
            let (Some(job), Some(feed)) = (&slot.job, &mut slot.feed) else { break };
            let count = feed.ready().saturating_sub(1).min(self.options.prompt_chunk);
            if count == 0 {
                break;
            }
            let rows: Vec<MtpRow<'_>> = (0..count)
                .map(|offset| {
                    let row = feed.first() + offset;
                    let hidden = feed.hidden(offset);
                    MtpRow { slot: 0, input: job.input(row), hidden, position: job.position(row), want_logits: false }
                })
                .collect();
            self.target.mtp_forward(&rows, &mut [&mut slot.state], &mut self.draft_out, None)?;
            drop(rows);
            feed.consumed(count);
            read += count;
        }
        if read > USUAL_BACKLOG {
            self.policy.observe_catch_up(read, started.elapsed().as_secs_f64());
        }
        Ok(())
    }

    /// The warning about a request's drafts, if any.
    pub(crate) fn draft_warning(&self, job: &Job) -> Option<String> {
        let (window, step) = self.policy.measured();
        let from_head = job.stats.drafted - job.stats.drafted_ngram;
        let accepted = job.stats.accepted - job.stats.accepted_ngram;
        implausible(from_head, accepted, Duration::from_secs_f64(step?), Duration::from_secs_f64(window?))
    }
}

/// Most drafts a request can use: one token of the window is always the model's own.
fn room(job: &Job, row: usize, ctx: usize) -> usize {
    (job.left().saturating_sub(1)).min(ctx.saturating_sub(row + 1))
}

fn offer<'a, T: Target>(
    slot: &'a Slot<T>,
    share: &Share,
    looked_up: usize,
    most_rows: usize,
    engine_setting: MtpSetting,
    ctx: usize,
) -> Offer<'a> {
    static NOTHING_SEEN: std::sync::LazyLock<super::draft::Acceptance> =
        std::sync::LazyLock::new(|| super::draft::Acceptance::new(1.0));
    let none = Offer { source: share.source, most: 0, fixed: true, backlog: 0, seen: &NOTHING_SEEN };
    let Some(job) = &slot.job else { return none };
    let setting = job.mtp.unwrap_or(engine_setting);
    match share.source {
        Source::Custom => Offer { most: looked_up, seen: &job.seen_lookup, ..none },
        Source::Ngram => Offer { most: looked_up, fixed: setting != MtpSetting::Auto, seen: &job.seen_lookup, ..none },
        Source::Mtp => {
            let ready = slot.feed.as_ref().map_or(0, |feed| feed.ready());
            let depth = match setting {
                MtpSetting::Off => 0,
                MtpSetting::Depth(depth) => depth.min(MAX_MTP_DEPTH),
                MtpSetting::Auto => MAX_MTP_DEPTH,
            };
            let usable = ready > 0 && !job.suspect;
            Offer {
                most: if usable { depth.min(room(job, share.row, ctx)).min(most_rows) } else { 0 },
                fixed: setting != MtpSetting::Auto,
                backlog: ready.saturating_sub(USUAL_BACKLOG),
                seen: &job.seen_mtp,
                ..none
            }
        }
    }
}
