//! How often drafts are accepted, per position in the chain, and the warning for acceptance too good to be true.

use std::time::Duration;

use super::super::options::MAX_MTP_DEPTH;

/// Positions told apart; further ones count with the last.
pub(crate) const POSITIONS: usize = MAX_MTP_DEPTH + 1;

/// Decaying counts of verified and accepted drafts per position, given that the ones before were accepted.
#[derive(Clone, Debug)]
pub(crate) struct Acceptance {
    hits: [f64; POSITIONS],
    trials: [f64; POSITIONS],
    /// What older observations keep of their weight with every new one.
    keep: f64,
}

impl Acceptance {
    /// `memory`: how many observations count.
    pub(crate) fn new(memory: f64) -> Self {
        Acceptance { hits: [0.0; POSITIONS], trials: [0.0; POSITIONS], keep: 1.0 - 1.0 / memory }
    }

    /// `accepted` of `drafted` tokens were right.
    pub(crate) fn observe(&mut self, drafted: usize, accepted: usize) {
        for position in 0..drafted.min(accepted + 1) {
            let at = position.min(POSITIONS - 1);
            self.hits[at] = self.hits[at] * self.keep + f64::from(u8::from(position < accepted));
            self.trials[at] = self.trials[at] * self.keep + 1.0;
        }
    }

    /// Expected acceptance at `position`, leaning on `prior` with the weight of `weight` observations.
    pub(crate) fn expect(&self, position: usize, prior: f64, weight: f64) -> f64 {
        let at = position.min(POSITIONS - 1);
        (self.hits[at] + prior * weight) / (self.trials[at] + weight)
    }

    /// Weight of the observations at `position`.
    pub(crate) fn trials(&self, position: usize) -> f64 {
        self.trials[position.min(POSITIONS - 1)]
    }
}

/// A head that is run as a head accepts less and costs less than this share of a window; above both it is the trunk in disguise.
const IMPLAUSIBLE_ACCEPTANCE: f64 = 0.97;
const IMPLAUSIBLE_COST: f64 = 0.6;
/// Fewer drafts say nothing.
const ENOUGH_DRAFTS: usize = 64;

/// Warns of drafts whose acceptance is too good for what a draft step costs: `step` is the mean time of one draft step and
/// `window` that of a plain window.
pub(crate) fn implausible(drafted: usize, accepted: usize, step: Duration, window: Duration) -> Option<String> {
    if drafted < ENOUGH_DRAFTS || window.is_zero() {
        return None;
    }
    let acceptance = accepted as f64 / drafted as f64;
    let cost = step.as_secs_f64() / window.as_secs_f64();
    (acceptance > IMPLAUSIBLE_ACCEPTANCE && cost > IMPLAUSIBLE_COST).then(|| {
        format!(
            "{:.1}% of {drafted} drafts were accepted while a draft step takes {:.0}% of a whole window: the draft head seems to \
             run the whole model, and such drafts cannot pay",
            100.0 * acceptance,
            100.0 * cost
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_after_a_rejection_are_not_counted() {
        let mut acceptance = Acceptance::new(1e9);
        acceptance.observe(3, 1);
        acceptance.observe(3, 3);
        acceptance.observe(1, 0);
        assert_eq!(acceptance.trials.map(|n| n.round() as u32)[..4], [3, 2, 1, 0]);
        assert_eq!(acceptance.hits.map(|n| n.round() as u32)[..4], [2, 1, 1, 0]);
        assert!((acceptance.expect(0, 0.5, 1.0) - 2.5 / 4.0).abs() < 1e-6);
    }

    #[test]
    fn only_perfect_and_slow_drafts_are_suspicious() {
        let ms = Duration::from_millis;
        assert!(implausible(100, 99, ms(9), ms(10)).is_some());
        assert!(implausible(100, 99, ms(1), ms(10)).is_none());
        assert!(implausible(100, 80, ms(9), ms(10)).is_none());
        assert!(implausible(10, 10, ms(9), ms(10)).is_none());
    }
}
