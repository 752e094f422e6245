//! What windows of 1..n rows and draft steps cost on this machine, measured while they run.

/// Measured times by number of rows.
#[derive(Clone, Debug)]
pub(crate) struct CostTable {
    /// Seconds and number of measurements, index = rows - 1.
    entries: Vec<(f64, u32)>,
    /// How much dearer one more row is where nothing was measured yet.
    slope: f64,
}

/// Weight of a new measurement.
const BLEND: f64 = 0.15;
/// Measurements of a row count that are taken one by one, without drift.
const SETTLE: u32 = 6;
/// Share of a change that counts as drift of the whole machine (longer contexts, other load) and moves all entries alike.
const DRIFT: f64 = 0.75;

impl CostTable {
    pub(crate) fn new(rows: usize, slope: f64) -> Self {
        CostTable { entries: vec![(0.0, 0); rows], slope }
    }

    /// Takes the time of one run of `rows` rows.
    pub(crate) fn observe(&mut self, rows: usize, seconds: f64) {
        let Some(&(old, count)) = self.entries.get(rows - 1) else { return };
        if count == 0 {
            self.entries[rows - 1] = (seconds, 1);
            return;
        }
        // One slow run (another process, a page fault) must not decide; the first ones are the likeliest to be slow.
        if count < SETTLE {
            // The very first touched fresh memory.
            let weight = match seconds < old {
                true if count == 1 => 1.0,
                true => 0.7,
                false => 0.2,
            };
            self.entries[rows - 1] = (old + weight * (seconds.min(old * 1.5) - old), count + 1);
            return;
        }
        let seconds = seconds.clamp(old * 0.5, old * 2.0);
        let new = old + BLEND * (seconds - old);
        let drift = (new / old).powf(DRIFT);
        for entry in &mut self.entries {
            entry.0 *= drift;
        }
        self.entries[rows - 1] = (new, count);
    }

    pub(crate) fn is_known(&self, rows: usize) -> bool {
        self.entries.get(rows - 1).is_some_and(|entry| entry.1 > 0)
    }

    /// Expected seconds of `rows` rows, from the nearest measurement where there is none; `None` if nothing was measured.
    pub(crate) fn expect(&self, rows: usize) -> Option<f64> {
        let rows = rows.min(self.entries.len());
        if let Some(below) = (1..=rows).rev().find(|&n| self.is_known(n)) {
            let known = self.entries[below - 1].0;
            // The mean slope measured so far, else the assumed one.
            let first = (1..below).find(|&n| self.is_known(n)).map(|n| (n, self.entries[n - 1].0));
            let slope =
                first.map_or(self.slope * known, |(n, seconds)| ((known - seconds) / (below - n) as f64).max(0.0));
            return Some(known + slope * (rows - below) as f64);
        }
        let above = (rows + 1..=self.entries.len()).find(|&n| self.is_known(n))?;
        Some(self.entries[above - 1].0 / (1.0 + self.slope * (above - rows) as f64))
    }

    /// Measurements of `rows` rows.
    pub(crate) fn count(&self, rows: usize) -> u32 {
        self.entries.get(rows - 1).map_or(0, |entry| entry.1)
    }

    /// Seconds per row count, 0 where unknown.
    pub(crate) fn seconds(&self) -> Vec<f64> {
        self.entries.iter().map(|entry| entry.0).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_sizes_lean_on_the_nearest_known() {
        let mut costs = CostTable::new(4, 0.5);
        assert_eq!(costs.expect(2), None);
        costs.observe(2, 1.0);
        assert_eq!(costs.expect(2), Some(1.0));
        assert_eq!(costs.expect(3), Some(1.5));
        assert!(costs.expect(1).unwrap() < 0.7);
        costs.observe(1, 0.9);
        assert!((costs.expect(4).unwrap() - 1.2).abs() < 1e-9);
    }

    #[test]
    fn drift_moves_all_sizes_and_an_outlier_little() {
        let mut costs = CostTable::new(2, 0.5);
        for _ in 0..10 {
            costs.observe(1, 1.0);
            costs.observe(2, 1.4);
        }
        let before = costs.expect(1).unwrap();
        costs.observe(1, 100.0);
        assert!(costs.expect(1).unwrap() < before * 1.2);
        for _ in 0..50 {
            costs.observe(1, 2.0);
        }
        let ratio = costs.expect(2).unwrap() / costs.expect(1).unwrap();
        assert!((1.1..1.5).contains(&ratio), "{ratio}");
    }
}
