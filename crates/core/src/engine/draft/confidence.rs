//! How often drafts are right that the head is as sure of as of this one: a chain of drafts ends where the next is not worth its row.

/// Levels of confidence told apart.
const LEVELS: usize = 8;
/// Lead of the drafted token's logit over the best other, below which a draft is of the level.
const BARS: [f32; LEVELS - 1] = [0.25, 0.5, 1.0, 1.5, 2.5, 4.0, 6.0];
/// Acceptance expected at each level before anything was seen, and how many observations that weighs.
const PRIOR: [f64; LEVELS] = [0.35, 0.45, 0.5, 0.6, 0.7, 0.82, 0.9, 0.95];
const PRIOR_WEIGHT: f64 = 4.0;
/// Observations that count per level.
const MEMORY: f64 = 300.0;

/// A level of confidence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Level(u8);

impl Level {
    /// The level of a draft whose logit leads the best other by `lead`.
    pub(crate) fn of(lead: f32) -> Level {
        Level(BARS.iter().take_while(|bar| lead >= **bar).count() as u8)
    }
}

/// Acceptance by level.
#[derive(Clone, Debug, Default)]
pub(crate) struct Calibration {
    hits: [f64; LEVELS],
    trials: [f64; LEVELS],
}

impl Calibration {
    /// The first `accepted` of a chain of drafts were right, and the next, if there was one, was not.
    pub(crate) fn observe(&mut self, chain: &[Level], accepted: usize) {
        for (position, level) in chain.iter().enumerate().take(accepted + 1) {
            let at = usize::from(level.0);
            let keep = 1.0 - 1.0 / MEMORY;
            self.hits[at] = self.hits[at] * keep + f64::from(u8::from(position < accepted));
            self.trials[at] = self.trials[at] * keep + 1.0;
        }
    }

    /// Expected acceptance of a draft of this level, all before it being right.
    pub(crate) fn expect(&self, level: Level) -> f64 {
        let at = usize::from(level.0);
        (self.hits[at] + PRIOR[at] * PRIOR_WEIGHT) / (self.trials[at] + PRIOR_WEIGHT)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_rise_with_the_lead() {
        assert_eq!(Level::of(-3.0), Level(0));
        assert_eq!(Level::of(f32::NAN), Level(0));
        assert_eq!(Level::of(1.0), Level(3));
        assert_eq!(Level::of(f32::INFINITY), Level(7));
    }

    #[test]
    fn acceptance_is_learned_per_level_up_to_the_first_rejection() {
        let mut calibration = Calibration::default();
        let chain = [Level(7), Level(2), Level(5)];
        for _ in 0..200 {
            calibration.observe(&chain, 1);
        }
        assert!(calibration.expect(Level(7)) > 0.98);
        assert!(calibration.expect(Level(2)) < 0.02);
        assert_eq!(calibration.expect(Level(5)), PRIOR[5]);
    }
}
