//! Rope angles of a row: interleaved M-RoPE over the frequency pairs.

use super::config::RopeConfig;

/// Frequencies and which coordinate of a position drives each.
pub(super) struct RopeTable {
    /// `[dims / 2]`
    frequencies: Vec<f32>,
    /// `[dims / 2]`: 0 for t, 1 for h, 2 for w.
    axes: Vec<usize>,
}

impl RopeTable {
    pub(super) fn new(rope: &RopeConfig) -> RopeTable {
        let pairs = rope.dims / 2;
        let frequency = |pair: usize| f64::from(rope.base).powf(-2.0 * pair as f64 / rope.dims as f64) as f32;
        let axis = |pair: usize| match pair % 3 {
            1 if pair < 3 * rope.sections[1] as usize => 1,
            2 if pair < 3 * rope.sections[2] as usize => 2,
            _ => 0,
        };
        RopeTable { frequencies: (0..pairs).map(frequency).collect(), axes: (0..pairs).map(axis).collect() }
    }

    /// Appends `[cos | sin]` of one row. The angle is the f32 product, as in the reference; its cosine and sine are exact
    /// to f32.
    pub(super) fn append(&self, position: [u32; 3], out: &mut Vec<f32>) {
        let angles = || {
            let pairs = self.frequencies.iter().zip(&self.axes);
            pairs.map(|(&frequency, &axis)| f64::from(position[axis] as f32 * frequency))
        };
        out.extend(angles().map(|angle| angle.cos() as f32));
        out.extend(angles().map(|angle| angle.sin() as f32));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sections_interleave_the_three_axes() {
        let rope = RopeConfig { dims: 64, base: 1e7, sections: [11, 11, 10, 0] };
        let table = RopeTable::new(&rope);
        let count = |axis| table.axes.iter().filter(|&&other| other == axis).count();
        assert_eq!((count(0), count(1), count(2)), (11, 11, 10));
        assert_eq!(table.axes[..7], [0, 1, 2, 0, 1, 2, 0]);
        assert_eq!(table.axes[30..], [0, 1]);
    }

    #[test]
    fn text_rows_turn_by_their_position() {
        let table = RopeTable::new(&RopeConfig { dims: 4, base: 100.0, sections: [1, 1, 0, 0] });
        let mut out = Vec::new();
        table.append([3, 3, 3], &mut out);
        let expected = [3.0f64.cos(), 0.3f64.cos(), 3.0f64.sin(), 0.3f64.sin()];
        for (value, expected) in out.iter().zip(expected) {
            assert!((f64::from(*value) - expected).abs() < 1e-7);
        }
    }
}
