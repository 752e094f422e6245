//! Choosing a token from a row of logits. The same row at the same position of the same request always gives the same token:
//! ties are broken by id and the draw is keyed by (seed, position), so drafts and batches change nothing.
//!
//! Order: logit bias, penalties, grammar mask, then greedy choice or top-k, top-p, min-p, temperature and the draw.

mod constraint;
mod penalties;
mod random;
mod select;

pub(crate) use constraint::Constraint;
#[cfg(test)]
pub(crate) use random::draw;

use super::request::{Sampling, TokenLogprobs};
use penalties::Penalties;

/// Most rivals a request can ask to see.
pub(crate) const MAX_TOP_LOGPROBS: usize = 64;

/// A token whose logit lies further than this (times the temperature, if that is above 1) below the largest one is never drawn:
/// its share is under e^-30, and the sum over a vocabulary of a million such tokens under 1e-7.
const NEGLIGIBLE: f32 = 30.0;

/// One request's sampler.
pub(crate) struct Sampler {
    sampling: Sampling,
    penalties: Penalties,
    /// Rivals to report, if log-probabilities are.
    logprobs: Option<usize>,
    /// Logits changed in place, to be put back.
    undo: Vec<(u32, f32)>,
    /// Candidates of a draw.
    candidates: Vec<(f32, u32)>,
    /// Logits under a grammar's mask.
    masked: Vec<f32>,
}

/// A chosen token.
pub(crate) struct Choice {
    pub(crate) id: u32,
    pub(crate) logprobs: Option<TokenLogprobs>,
}

impl Sampler {
    /// `prompt`: the prompt's tokens. `forbidden`: ids never to be chosen.
    pub(crate) fn new(sampling: &Sampling, logprobs: Option<u8>, prompt: &[u32], forbidden: &[u32]) -> Self {
        let mut sampling = sampling.clone();
        sampling.logit_bias.extend(forbidden.iter().map(|&id| (id, f32::NEG_INFINITY)));
        Sampler {
            penalties: Penalties::new(&sampling, prompt),
            sampling,
            logprobs: logprobs.map(|n| usize::from(n).min(MAX_TOP_LOGPROBS)),
            undo: Vec::new(),
            candidates: Vec::new(),
            masked: Vec::new(),
        }
    }

    /// Chooses the token at row `position`. `allowed` is a grammar's verdict on every id. The logits are as before when it
    /// returns. `None`: nothing is allowed.
    pub(crate) fn choose(
        &mut self,
        logits: &mut [f32],
        position: usize,
        allowed: Option<&dyn Fn(u32) -> bool>,
    ) -> Option<Choice> {
        let id = self.pick_from(logits, position, allowed)?;
        Some(Choice { id, logprobs: self.logprobs.map(|n| self.report(logits, id, n)) })
    }

    /// As [`Sampler::choose`], without log-probabilities.
    pub(crate) fn pick_from(
        &mut self,
        logits: &mut [f32],
        position: usize,
        allowed: Option<&dyn Fn(u32) -> bool>,
    ) -> Option<u32> {
        self.undo.clear();
        for &(id, bias) in &self.sampling.logit_bias {
            if let Some(logit) = logits.get_mut(id as usize) {
                self.undo.push((id, *logit));
                *logit += bias;
            }
        }
        self.penalties.apply(logits, &mut self.undo);
        let id = match allowed {
            None => self.pick(logits, position),
            Some(allowed) => {
                let mut masked = std::mem::take(&mut self.masked);
                masked.clear();
                let verdicts = logits.iter().enumerate();
                masked.extend(verdicts.map(|(id, &x)| if allowed(id as u32) { x } else { f32::NEG_INFINITY }));
                let id = self.pick(&masked, position);
                self.masked = masked;
                id
            }
        };
        for &(id, logit) in self.undo.iter().rev() {
            logits[id as usize] = logit;
        }
        id
    }

    /// Takes note of the token chosen.
    pub(crate) fn accept(&mut self, token: u32) {
        self.penalties.accept(token);
    }

    /// Log-probabilities of the model's own distribution.
    pub(crate) fn report(&mut self, logits: &[f32], id: u32, rivals: usize) -> TokenLogprobs {
        let total = select::log_sum_exp(logits);
        let of = |logit: f32| (f64::from(logit) - total) as f32;
        select::top_k(logits, rivals, &mut self.candidates);
        TokenLogprobs {
            logprob: of(logits[id as usize]),
            top: self.candidates.iter().map(|&(logit, id)| (id, of(logit))).collect(),
        }
    }

    /// Whether `report` was asked for, and for how many rivals.
    pub(crate) fn logprobs(&self) -> Option<usize> {
        self.logprobs
    }

    fn pick(&mut self, logits: &[f32], position: usize) -> Option<u32> {
        let Sampling { temperature, top_k, top_p, min_p, seed, .. } = self.sampling;
        if temperature == 0.0 || top_k == 1 {
            let id = select::argmax(logits);
            return (logits[id as usize] > f32::NEG_INFINITY).then_some(id);
        }
        let candidates = &mut self.candidates;
        if top_k > 0 && top_k < logits.len() {
            select::top_k(logits, top_k, candidates);
        } else {
            let bar = select::largest(logits) - NEGLIGIBLE * temperature.max(1.0);
            candidates.clear();
            candidates.extend(logits.iter().enumerate().filter(|(_, x)| **x > bar).map(|(id, &x)| (x, id as u32)));
            if top_p < 1.0 {
                candidates.sort_unstable_by(select::before);
            }
        }
        let largest = candidates.iter().fold(f32::NEG_INFINITY, |best, &(x, _)| best.max(x));
        if largest == f32::NEG_INFINITY {
            return None;
        }
        if top_p < 1.0 {
            let share = |x: f32| f64::from(x - largest).exp();
            let enough = candidates.iter().map(|&(x, _)| share(x)).sum::<f64>() * f64::from(top_p);
            let mut sum = 0.0;
            let kept = candidates.iter().take_while(|(x, _)| {
                let more = sum < enough;
                sum += share(*x);
                more
            });
            let kept = kept.count().max(1);
            candidates.truncate(kept);
        }
        if min_p > 0.0 {
            let bar = largest + min_p.ln();
            candidates.retain(|&(x, _)| x >= bar);
        }
        let weight = |x: f32| (f64::from(x - largest) / f64::from(temperature)).exp();
        let mut left = candidates.iter().map(|&(x, _)| weight(x)).sum::<f64>() * random::draw(seed, position as u64);
        for &(x, id) in candidates.iter() {
            left -= weight(x);
            if left < 0.0 {
                return Some(id);
            }
        }
        candidates.last().map(|&(_, id)| id)
    }
}

/// By how much the logit of `id` leads the best other; negative if another is larger. The logits are as before when it returns.
pub(crate) fn lead(logits: &mut [f32], id: u32) -> f32 {
    let own = std::mem::replace(&mut logits[id as usize], f32::NEG_INFINITY);
    let rival = select::largest(logits);
    logits[id as usize] = own;
    own - rival
}

/// Probability of token `id` under a row of logits.
pub(crate) fn probability(logits: &[f32], id: u32) -> f64 {
    (f64::from(logits[id as usize]) - select::log_sum_exp(logits)).exp()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sampler(sampling: Sampling) -> Sampler {
        Sampler::new(&sampling, None, &[], &[])
    }

    fn shares(sampling: Sampling, logits: &[f32]) -> Vec<f64> {
        let mut sampler = sampler(sampling);
        let mut logits = logits.to_vec();
        let mut counts = vec![0f64; logits.len()];
        const DRAWS: usize = 40_000;
        for position in 0..DRAWS {
            counts[sampler.choose(&mut logits, position, None).unwrap().id as usize] += 1.0 / DRAWS as f64;
        }
        counts
    }

    /// Six standard deviations of a share over 40,000 draws.
    const SPREAD: f64 = 6.0 * 0.0025;

    fn assert_close(found: &[f64], expected: &[f64]) {
        for (f, e) in found.iter().zip(expected) {
            assert!((f - e).abs() < SPREAD, "{found:?} {expected:?}");
        }
    }

    fn logits(shares: &[f32]) -> Vec<f32> {
        shares.iter().map(|p| p.ln()).collect()
    }

    #[test]
    fn draws_follow_the_distribution() {
        let row = logits(&[0.1, 0.5, 0.15, 0.25]);
        let at = |sampling: Sampling| shares(Sampling { temperature: 1.0, seed: 5, ..sampling }, &row);
        assert_close(&at(Sampling::default()), &[0.1, 0.5, 0.15, 0.25]);
        assert_close(&at(Sampling { top_k: 2, ..Sampling::default() }), &[0.0, 2.0 / 3.0, 0.0, 1.0 / 3.0]);
        assert_close(&at(Sampling { top_p: 0.7, ..Sampling::default() }), &[0.0, 2.0 / 3.0, 0.0, 1.0 / 3.0]);
        assert_close(&at(Sampling { min_p: 0.28, ..Sampling::default() }), &[0.0, 5.0 / 9.0, 1.5 / 9.0, 2.5 / 9.0]);
        let hot = shares(Sampling { temperature: 2.0, seed: 6, ..Sampling::default() }, &logits(&[0.64, 0.36]));
        assert_close(&hot, &[0.8 / 1.4, 0.6 / 1.4]);
    }

    #[test]
    fn a_bias_can_force_and_forbid_and_the_row_is_left_as_it_was() {
        let row = [1.0, 3.0, 2.0];
        let forbid = Sampling { logit_bias: vec![(1, f32::NEG_INFINITY)], ..Sampling::default() };
        let mut changed = row;
        assert_eq!(sampler(forbid).choose(&mut changed, 0, None).unwrap().id, 2);
        assert_eq!(changed, row);
        let force = Sampling { logit_bias: vec![(0, 100.0)], temperature: 1.0, ..Sampling::default() };
        assert_eq!(sampler(force).choose(&mut changed, 0, None).unwrap().id, 0);
        let mut end = Sampler::new(&Sampling::default(), None, &[], &[1]);
        assert_eq!(end.choose(&mut changed, 0, None).unwrap().id, 2);
    }

    #[test]
    fn logprobs_are_of_the_models_own_distribution() {
        let mut row = logits(&[0.1, 0.5, 0.4]);
        let sampling = Sampling { logit_bias: vec![(0, 10.0)], ..Sampling::default() };
        let mut sampler = Sampler::new(&sampling, Some(2), &[], &[]);
        let choice = sampler.choose(&mut row, 0, None).unwrap();
        assert_eq!(choice.id, 0);
        let logprobs = choice.logprobs.unwrap();
        assert!((logprobs.logprob - 0.1f32.ln()).abs() < 1e-6);
        assert_eq!(logprobs.top.iter().map(|t| t.0).collect::<Vec<_>>(), [1, 2]);
        assert!((logprobs.top[1].1 - 0.4f32.ln()).abs() < 1e-6);
    }

    #[test]
    fn a_mask_rules_for_greedy_and_for_draws_and_an_empty_one_is_told() {
        let mut row = logits(&[0.1, 0.6, 0.3]);
        for temperature in [0.0, 1.0] {
            let mut sampler = sampler(Sampling { temperature, ..Sampling::default() });
            for position in 0..50 {
                assert_ne!(sampler.choose(&mut row, position, Some(&|id| id != 1)).unwrap().id, 1);
            }
            assert!(sampler.choose(&mut row, 0, Some(&|_| false)).is_none());
        }
    }

    #[test]
    fn penalties_are_put_back_exactly() {
        let sampling =
            Sampling { repeat_penalty: 1.3, presence_penalty: 0.7, frequency_penalty: 0.1, ..Sampling::default() };
        let mut sampler = Sampler::new(&sampling, None, &[0, 1], &[]);
        sampler.accept(1);
        let row = [0.3, 0.9, -0.2];
        let mut changed = row;
        assert_eq!(sampler.choose(&mut changed, 0, None).unwrap().id, 0);
        assert_eq!(changed, row);
    }
}
