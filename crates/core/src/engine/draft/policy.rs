//! How many drafts each slot carries in the next window.
//!
//! A fixed depth is given as far as the window has room. `auto` starts without drafts and maximises expected tokens per second
//! from what it measures: windows of 1..n rows, draft steps, acceptance per position. It bets from a purse, kept in units of plain
//! windows: every window earns a small share of its time, a drafted window wins or loses what it was faster or slower than plain
//! ones, and with an empty purse nothing is drafted. So the loss against no drafts is bounded by the start capital and the
//! share, whatever the estimates say; and where drafts pay, the purse stays full.

use super::acceptance::Acceptance;
use super::confidence::{Calibration, Level};
use super::costs::CostTable;
use super::vocabulary::DraftVocabulary;
use crate::engine::options::DraftCosts;

/// Where a slot's drafts come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    Mtp,
    Ngram,
    Custom,
}

/// What one decoding slot could draft.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Offer<'a> {
    pub(crate) source: Source,
    /// Most drafts it can carry; 0 offers none.
    pub(crate) most: usize,
    /// Draft this many whether it pays or not, as far as there is room.
    pub(crate) fixed: bool,
    /// Rows the MTP cache must read before the first draft, beyond the usual few.
    pub(crate) backlog: usize,
    /// Acceptance seen in this request.
    pub(crate) seen: &'a Acceptance,
}

/// Share of the decode time that may be spent on finding out.
const SHARE: f64 = 0.012;
/// Start capital, in plain windows.
const CAPITAL: f64 = 1.5;
/// Most the purse holds: past wins must not pay for a long losing streak.
const FULL: f64 = 5.0;
/// Drafts that pay by the estimate may overdraw the purse by one window per this many observations, up to a limit.
const CREDIT_PER: f64 = 20.0;
const MOST_CREDIT: f64 = 3.0;
/// A probe against the estimate needs this much.
const PROBE: f64 = 1.2;
/// So many measurements of a window with one draft are taken without waiting: the first ones touch fresh memory.
const SETTLED: u32 = 4;
/// Drafts must promise this much more than none.
const MARGIN: f64 = 1.01;
/// Plain windows measured before anything is drafted.
const PLAIN_FIRST: u32 = 3;
/// A plain window in between keeps the comparison honest.
const PLAIN_AGAIN: u64 = 64;
/// Expected acceptance before anything was seen: at the first position, and at each further one the share it keeps of that before.
const PRIOR: f64 = 0.8;
const PRIOR_DECAY: f64 = 0.95;
/// Windows between two looks one draft deeper than the best depth, while the purse is at least half full.
const LOOK_DEEPER: u64 = 24;
/// Weight of the prior against all requests' observations, and of those against the request's own.
const PRIOR_WEIGHT: f64 = 2.0;
const GLOBAL_WEIGHT: f64 = 8.0;
/// Tokens that promises are taken for kept before anything came of them, and what older ones keep of their weight.
const PROMISE_WEIGHT: f64 = 16.0;
const PROMISE_KEEPS: f64 = 0.98;
/// Share by which a plain window brings both together again.
const PROMISE_FADES: f64 = 0.004;
/// Windows between two choices of the draft vocabulary.
const CHOOSE_VOCABULARY: u64 = 16;
/// A backlog's cost is spread over this many windows when drafts are weighed.
const SPREAD: f64 = 32.0;

/// Chooses depths and learns from windows.
pub(crate) struct DraftPolicy {
    max_window: usize,
    /// How much of it drafts look at.
    pub(crate) vocabulary: DraftVocabulary,
    windows: CostTable,
    /// MTP draft steps by number of slots drafting, as if over the whole vocabulary.
    steps: CostTable,
    /// Seconds per row of catching up the MTP cache; 0 until measured.
    catch_up_row_s: f64,
    mtp: Acceptance,
    ngram: Acceptance,
    /// Acceptance by the head's confidence.
    calibration: Calibration,
    /// What a slot alone gained by drafts, in tokens, and what the estimates had promised for the same time.
    gained: f64,
    promised: f64,
    /// Promise of the window under way, in tokens per plain window; 0 when nothing is drafted.
    promise: f64,
    purse: f64,
    /// Decode windows seen, and the number at the last plain one per slot count.
    seen: u64,
    last_plain: Vec<u64>,
    last_probe: u64,
    last_deeper: u64,
    /// Costs taken for true whatever is measured.
    assumed: Option<DraftCosts>,
}

impl DraftPolicy {
    pub(crate) fn new(max_window: usize, vocabulary: DraftVocabulary) -> Self {
        DraftPolicy {
            max_window,
            vocabulary,
            windows: CostTable::new(max_window, 0.3),
            steps: CostTable::new(max_window, 0.5),
            catch_up_row_s: 0.0,
            mtp: Acceptance::new(400.0),
            ngram: Acceptance::new(400.0),
            calibration: Calibration::default(),
            gained: PROMISE_WEIGHT,
            promised: PROMISE_WEIGHT,
            promise: 0.0,
            purse: CAPITAL,
            seen: 0,
            last_plain: vec![0; max_window + 1],
            last_probe: 0,
            last_deeper: 0,
            assumed: None,
        }
    }

    /// Takes `costs` for true, whatever is measured.
    pub(crate) fn assuming(self, costs: Option<DraftCosts>) -> Self {
        DraftPolicy { assumed: costs, ..self }
    }

    /// Seconds of a window of `rows` rows: those measured, or assumed ones in units of a window of one row.
    fn of_window(&self, rows: usize, measured: f64) -> f64 {
        self.assumed.map_or(measured, |costs| 1.0 + costs.row * (rows - 1) as f64)
    }

    /// Sets `depths` to the drafts of each offer for the next window.
    pub(crate) fn plan(&mut self, offers: &[Offer<'_>], depths: &mut Vec<usize>) {
        self.promise = 0.0;
        depths.clear();
        depths.resize(offers.len(), 0);
        let mut spare = self.max_window.saturating_sub(offers.len());
        // Fixed depths, one more each in turn.
        let mut level = 1;
        while spare > 0 && offers.iter().any(|offer| offer.fixed && offer.most >= level) {
            for (offer, depth) in offers.iter().zip(depths.iter_mut()) {
                if spare > 0 && offer.fixed && offer.most >= level {
                    *depth = level;
                    spare -= 1;
                }
            }
            level += 1;
        }
        if spare > 0 && offers.iter().any(|offer| !offer.fixed && offer.most > 0) {
            self.plan_auto(offers, depths, spare);
        }
    }

    fn plan_auto(&mut self, offers: &[Offer<'_>], depths: &mut [usize], spare: usize) {
        let slots = offers.len();
        if self.windows.count(slots) < PLAIN_FIRST || self.seen - self.last_plain[slots] > PLAIN_AGAIN {
            return;
        }
        let Some(plain) = self.windows.expect(slots) else { return };
        let plain_rate = slots as f64 / plain;
        let mut best = (plain_rate * MARGIN, depths.to_vec());
        let mut trial = depths.to_vec();
        // Chance that the slot's next draft, and all before it, are accepted.
        let mut chain: Vec<f64> = offers.iter().map(|offer| self.chance(offer, 0)).collect();
        let mut tokens = slots as f64;
        let mut rows = slots + depths.iter().sum::<usize>();
        let mut first = None;
        for _ in 0..spare {
            let open = (0..slots).filter(|&i| !offers[i].fixed && trial[i] < offers[i].most);
            let Some(i) = open.max_by(|&a, &b| chain[a].total_cmp(&chain[b]).then(b.cmp(&a))) else { break };
            trial[i] += 1;
            rows += 1;
            tokens += chain[i];
            chain[i] *= self.chance(&offers[i], trial[i]);
            first.get_or_insert_with(|| trial.clone());
            let Some(seconds) = self.windows.expect(rows) else { break };
            let rate = tokens / (seconds + self.draft_seconds(offers, &trial, plain, SPREAD));
            if rate > best.0 {
                best = (rate, trial.clone());
            }
            if !self.windows.is_known(rows) {
                // One size at a time: the next is judged once this one is measured.
                break;
            }
        }
        // Chains end early where the head is unsure, which the estimate does not know; what came of earlier promises does.
        let kept = if slots == 1 { self.gained / self.promised } else { 1.0 };
        let pays = best.0 * kept > plain_rate * MARGIN;
        let soon = self.windows.count(slots + 1) < SETTLED || self.seen - self.last_probe > PLAIN_AGAIN / 2;
        let probe = first.filter(|_| !pays && self.purse > PROBE && soon);
        let mut chosen = if pays { best.1 } else { probe.unwrap_or_else(|| depths.to_vec()) };
        if pays && self.purse > 0.5 * FULL && self.seen - self.last_deeper > LOOK_DEEPER {
            self.last_deeper = self.seen;
            let drafted: usize = chosen.iter().sum();
            let deepest = (0..slots)
                .max_by_key(|&i| (chosen[i], slots - i))
                .filter(|&i| !offers[i].fixed && chosen[i] < offers[i].most);
            if let Some(i) = deepest.filter(|_| slots + drafted < self.max_window) {
                chosen[i] += 1;
            }
        }
        if chosen.as_slice() == depths {
            return;
        }
        // What the backlog costs must be in the purse, too.
        let debt = (self.draft_seconds(offers, &chosen, plain, 1.0)
            - self.draft_seconds(offers, &chosen, plain, f64::INFINITY))
            / plain;
        // Where much was seen the estimate itself turns when drafts stop paying; bad luck alone must not stop them.
        let credit =
            if pays { (self.mtp.trials(0).max(self.ngram.trials(0)) / CREDIT_PER).min(MOST_CREDIT) } else { 0.0 };
        if self.purse + credit > debt {
            if !pays {
                self.last_probe = self.seen;
            }
            depths.copy_from_slice(&chosen);
            self.promise = best.0 / plain_rate;
        }
    }

    /// Whether a draft in row `rows + 1` of the window is worth it, if with `chance` it and all before it are accepted.
    pub(crate) fn keeps(&self, rows: usize, chance: f64) -> bool {
        let (Some(plain), Some(row)) = (self.windows.expect(1), self.row_seconds(rows)) else { return true };
        chance * plain > row
    }

    /// Whether to look for a draft for row `rows + 1`, the `position`th of a chain which with `chance` is accepted so far.
    pub(crate) fn goes_on(&self, rows: usize, position: usize, chance: f64) -> bool {
        let (Some(plain), Some(row)) = (self.windows.expect(1), self.row_seconds(rows)) else { return true };
        let step = self.steps.expect(1).unwrap_or(0.0) * self.vocabulary.cost(self.vocabulary.limit());
        chance * self.mtp.expect(position, PRIOR, PRIOR_WEIGHT) * plain > row + step
    }

    /// What row `rows + 1` adds to a window.
    fn row_seconds(&self, rows: usize) -> Option<f64> {
        Some(self.windows.expect(rows + 1)? - self.windows.expect(rows)?)
    }

    /// Expected acceptance of a draft the head is so sure of.
    pub(crate) fn confidence(&self, level: Level) -> f64 {
        self.calibration.expect(level)
    }

    /// A chain of which the first `accepted` were right.
    pub(crate) fn observe_confidence(&mut self, chain: &[Level], accepted: usize) {
        self.calibration.observe(chain, accepted);
    }

    /// Expected seconds of drafting; the backlog divided by `spread`.
    fn draft_seconds(&self, offers: &[Offer<'_>], depths: &[usize], plain: f64, spread: f64) -> f64 {
        let of_mtp = || offers.iter().zip(depths).filter(|(offer, _)| offer.source == Source::Mtp);
        let mut seconds = 0.0;
        let cost = self.vocabulary.cost(self.vocabulary.limit());
        for level in 1.. {
            let drafting = of_mtp().filter(|(_, depth)| **depth >= level).count();
            if drafting == 0 {
                break;
            }
            seconds += self.steps.expect(drafting).map_or(plain * 0.25, |whole| whole * cost);
        }
        let backlog: usize = of_mtp().filter(|(_, depth)| **depth > 0).map(|(offer, _)| offer.backlog).sum();
        let row = if self.catch_up_row_s > 0.0 {
            self.catch_up_row_s
        } else {
            self.steps.expect(1).unwrap_or(plain * 0.25) * 0.3
        };
        seconds + backlog as f64 * row / spread
    }

    fn chance(&self, offer: &Offer<'_>, position: usize) -> f64 {
        let all = if offer.source == Source::Mtp { &self.mtp } else { &self.ngram };
        let expect =
            |position, prior| offer.seen.expect(position, all.expect(position, prior, PRIOR_WEIGHT), GLOBAL_WEIGHT);
        (1..=position).fold(expect(0, PRIOR), |before, position| expect(position, before * PRIOR_DECAY))
    }

    /// A window of `rows` rows took so long while nobody waited for it.
    pub(crate) fn calibrate_window(&mut self, rows: usize, seconds: f64) {
        self.windows.observe(rows, self.of_window(rows, seconds));
    }

    /// Whether filling the MTP cache while a prompt is read is worth its time.
    pub(crate) fn believes_in_mtp(&self) -> bool {
        // Until enough was seen the head gets its chance.
        self.mtp.trials(0) < 16.0 || self.purse > 0.5 * FULL
    }

    /// A decode window of `rows` rows from `slots` slots gave `tokens` tokens in `window_s` seconds after `draft_s` of drafting.
    pub(crate) fn observe_window(&mut self, slots: usize, rows: usize, tokens: usize, draft_s: f64, window_s: f64) {
        let window_s = self.of_window(rows, window_s);
        let draft_s = self.assumed.map_or(draft_s, |costs| costs.step * (rows - slots) as f64);
        let new_size = self.windows.count(rows) == 0;
        self.windows.observe(rows, window_s);
        self.seen += 1;
        if self.seen.is_multiple_of(CHOOSE_VOCABULARY) {
            self.choose_vocabulary();
        }
        let drafted = rows > slots || self.promise > 0.0;
        if rows == slots {
            self.last_plain[slots] = self.seen;
        }
        if !drafted {
            self.purse += SHARE;
            // What came of promises long ago says less and less.
            self.gained += PROMISE_FADES * (self.promised - self.gained);
        } else if let Some(plain) = self.windows.expect(slots).filter(|_| !new_size) {
            // (The first window of a size touches fresh memory, once: that says nothing of the next.)
            let took = (draft_s + window_s) / plain;
            self.purse += tokens as f64 / slots as f64 - took + SHARE * took;
            if slots == 1 && self.promise > 0.0 {
                self.gained = self.gained * PROMISE_KEEPS + tokens as f64;
                self.promised = self.promised * PROMISE_KEEPS + self.promise * took;
            }
        }
        self.purse = self.purse.min(FULL);
    }

    /// One step of the MTP head for `slots` slots over the first `limit` tokens.
    pub(crate) fn observe_step(&mut self, slots: usize, limit: Option<usize>, seconds: f64) {
        let whole = self.assumed.map_or(seconds / self.vocabulary.cost(limit), |costs| costs.step);
        self.steps.observe(slots, whole);
    }

    /// Weighs anew how much of the vocabulary drafts look at.
    pub(crate) fn choose_vocabulary(&mut self) {
        if let (Some(window), Some(step)) = (self.windows.expect(2), self.steps.expect(1)) {
            self.vocabulary.choose(self.mtp.expect(0, PRIOR, PRIOR_WEIGHT), window, step);
        }
    }

    /// Catching up `rows` rows of the MTP cache.
    pub(crate) fn observe_catch_up(&mut self, rows: usize, seconds: f64) {
        let row = self.assumed.map_or(seconds / rows as f64, |costs| 0.3 * costs.step);
        self.catch_up_row_s =
            if self.catch_up_row_s == 0.0 { row } else { self.catch_up_row_s + 0.2 * (row - self.catch_up_row_s) };
    }

    /// `accepted` of `drafted` tokens of `source` were right.
    pub(crate) fn observe_drafts(&mut self, source: Source, drafted: usize, accepted: usize) {
        match source {
            Source::Mtp => self.mtp.observe(drafted, accepted),
            Source::Ngram | Source::Custom => self.ngram.observe(drafted, accepted),
        }
    }

    /// Mean seconds of a plain window of one slot and of one draft step as they are now, where measured.
    pub(crate) fn measured(&self) -> (Option<f64>, Option<f64>) {
        let cost = self.vocabulary.cost(self.vocabulary.limit());
        (self.windows.expect(1), self.steps.expect(1).map(|whole| whole * cost))
    }

    pub(crate) fn window_seconds(&self) -> Vec<f64> {
        self.windows.seconds()
    }

    /// Expected MTP acceptance per position.
    pub(crate) fn acceptance(&self) -> Vec<f64> {
        let known = (0..super::acceptance::POSITIONS).take_while(|&p| self.mtp.trials(p) > 0.0);
        known.map(|p| self.mtp.expect(p, PRIOR, 0.0)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::sampler::draw;
    use super::*;

    /// A machine and a text: window seconds by rows, draft step seconds, acceptance per position.
    struct World {
        window: fn(usize) -> f64,
        step: f64,
        accept: fn(usize) -> f64,
    }

    impl World {
        /// Seconds for `tokens` tokens with `slots` slots; `depth`: fixed, or `None` for auto.
        fn run(&self, slots: usize, tokens: usize, depth: Option<usize>, policy: &mut DraftPolicy, seed: u64) -> f64 {
            let seen = Acceptance::new(1e9);
            let mut seen: Vec<Acceptance> = vec![seen; slots];
            let (mut made, mut clock, mut depths, mut at) = (0, 0.0, Vec::new(), 0);
            let mut random = || {
                at += 1;
                draw(seed, at)
            };
            while made < tokens {
                let offers: Vec<_> = seen
                    .iter()
                    .map(|seen| Offer {
                        source: Source::Mtp,
                        most: depth.unwrap_or(6),
                        fixed: depth.is_some(),
                        backlog: 0,
                        seen,
                    })
                    .collect();
                policy.plan(&offers, &mut depths);
                // Times vary by a tenth.
                let mut noisy = |seconds: f64| seconds * (0.95 + 0.1 * random());
                let mut draft_s = 0.0;
                for level in 1..=depths.iter().copied().max().unwrap_or(0) {
                    let drafting = depths.iter().filter(|d| **d >= level).count();
                    let seconds = noisy(self.step * (1.0 + 0.3 * (drafting - 1) as f64));
                    policy.observe_step(drafting, None, seconds);
                    draft_s += seconds;
                }
                let rows = slots + depths.iter().sum::<usize>();
                let window_s = noisy((self.window)(rows));
                let mut gained = slots;
                for (i, &depth) in depths.iter().enumerate().filter(|(_, d)| **d > 0) {
                    let accepted = (0..depth).take_while(|&p| random() < (self.accept)(p)).count();
                    seen[i].observe(depth, accepted);
                    policy.observe_drafts(Source::Mtp, depth, accepted);
                    gained += accepted;
                }
                policy.observe_window(slots, rows, gained, draft_s, window_s);
                clock += draft_s + window_s;
                made += gained;
            }
            clock / made as f64
        }
    }

    fn policy() -> DraftPolicy {
        DraftPolicy::new(8, DraftVocabulary::new(1000, 0.0))
    }

    fn worlds() -> Vec<World> {
        vec![
            World { window: |n| 1.0 + 0.1 * (n - 1) as f64, step: 0.1, accept: |_| 0.9 },
            World { window: |n| 1.0 + 0.1 * (n - 1) as f64, step: 0.2, accept: |p| 0.6 - 0.1 * p as f64 },
            World { window: |n| 1.0 + 0.7 * (n - 1) as f64, step: 0.1, accept: |_| 0.6 },
            World { window: |n| 1.0 + 0.7 * (n - 1) as f64, step: 0.1, accept: |_| 0.9 },
            World { window: |n| 1.0 + 0.3 * (n - 1) as f64, step: 0.3, accept: |_| 0.05 },
            World { window: |n| 1.0 + 0.9 * (n - 1) as f64, step: 1.0, accept: |_| 0.99 },
            World { window: |n| if n == 1 { 1.0 } else { 1.6 }, step: 0.1, accept: |_| 0.8 },
        ]
    }

    #[test]
    fn auto_loses_at_most_three_percent_to_none_even_on_one_short_answer() {
        for (w, world) in worlds().iter().enumerate() {
            for slots in [1, 3] {
                for tokens in [96, 2000] {
                    let mean = |depth: Option<usize>| {
                        (0..20).map(|seed| world.run(slots, tokens * slots, depth, &mut policy(), seed)).sum::<f64>()
                            / 20.0
                    };
                    let (auto, off) = (mean(None), mean(Some(0)));
                    assert!(
                        auto < off * 1.03,
                        "world {w}, {slots} slots, {tokens} tokens: auto {auto:.3}, off {off:.3}"
                    );
                }
            }
        }
    }

    #[test]
    fn auto_comes_close_to_the_best_depth_once_it_has_seen_the_text() {
        for (w, world) in worlds().iter().enumerate() {
            let mut learned = policy();
            world.run(1, 600, None, &mut learned, 1);
            let auto = world.run(1, 4000, None, &mut learned, 2);
            let fixed = |depth| world.run(1, 4000, Some(depth), &mut policy(), 2);
            let best = (0..=6).map(fixed).fold(f64::INFINITY, f64::min);
            assert!(auto < best * 1.05, "world {w}: auto {auto:.3}, best {best:.3}");
        }
    }

    #[test]
    fn fixed_depths_share_the_spare_rows_in_turn() {
        let seen = Acceptance::new(1e9);
        let offer = |most| Offer { source: Source::Mtp, most, fixed: true, backlog: 0, seen: &seen };
        let mut depths = Vec::new();
        let mut fresh = policy();
        fresh.plan(&[offer(4)], &mut depths);
        assert_eq!(depths, [4]);
        fresh.plan(&[offer(4), offer(1), offer(4)], &mut depths);
        assert_eq!(depths, [2, 1, 2]);
        fresh.plan(&vec![offer(3); 8], &mut depths);
        assert_eq!(depths, [0; 8]);
    }
}
