//! The quantizer of `Q6_K`: sub-blocks of 16 weights stored as `scale * q` with `q` in `-32..=31` and scales of either
//! sign on an 8-bit grid.
//!
//! Same idea as [`super::quantize_asymmetric`], with the sixteen sub-blocks of a superblock in the lanes: trial scales
//! and least squares, then the grid and its neighbours, then the largest error of the call is pulled down.

use super::blocks::{Half, SUPERBLOCK};
use super::quantize_fit::{
    Columns, Superblock, clamp, columns, cost, finite_half, importance_columns, inverse, larger, larger_lane, round,
    smaller, worst_lane,
};

/// Sub-blocks of a superblock: one lane each.
const LANES: usize = 16;
/// Weights of a sub-block.
const SUB: usize = 16;
/// Lowest and highest level.
const BOTTOM: f32 = -32.0;
const TOP: f32 = 31.0;
/// One value per sub-block.
type Lanes = [f32; LANES];
/// A fitted superblock: weight `i` of sub-block `s` is `d * scales[s] * (levels[16 * s + i] - 32)`.
#[derive(Clone, Copy)]
pub(super) struct Block {
    pub d: Half,
    pub scales: [i8; LANES],
    pub levels: [u8; SUPERBLOCK],
}

/// The grid of a superblock before the levels are assigned.
#[derive(Clone, Copy)]
pub(super) struct Grid {
    d: Half,
    scales: Lanes,
}

/// Steps of the superblock tried for one sub-block when the largest error is pulled down.
const STEPS_TRIED: usize = 14;

/// One superblock to be fitted.
pub(super) struct Symmetric {
    x: Columns<LANES, SUB>,
    /// Importance (all ones without an importance matrix).
    w: Columns<LANES, SUB>,
    weighted: bool,
    /// The weight of largest size of each sub-block, with its sign.
    extreme: Lanes,
}

impl Superblock for Symmetric {
    type Grid = Grid;
    type Block = Block;
    const ENOUGH: f32 = 0.78;
    const STEPS: f32 = -BOTTOM;

    #[inline(always)]
    fn new(weights: &[f32; SUPERBLOCK], importance: Option<&[f32]>) -> Self {
        let x = columns(weights);
        let mut extreme = [0.0f32; LANES];
        for column in &x {
            for s in 0..LANES {
                extreme[s] = if column[s].abs() > extreme[s].abs() { column[s] } else { extreme[s] };
            }
        }
        Symmetric { x, w: importance_columns(importance), weighted: importance.is_some(), extreme }
    }

    #[inline(always)]
    fn reach(&self) -> f32 {
        larger_lane(&self.extreme.map(f32::abs))
    }

    #[inline(always)]
    fn fit(&self) -> Grid {
        let scales = if self.weighted { self.search::<true>() } else { self.search::<false>() };
        // The extreme scale lies at -128, the longer side of the grid.
        let mut extreme = 0.0f32;
        for s in 0..LANES {
            extreme = if scales[s].abs() > extreme.abs() { scales[s] } else { extreme };
        }
        self.on_grid(finite_half(extreme / -128.0), &scales)
    }

    #[inline(always)]
    fn largest_error(&self, grid: &Grid) -> f32 {
        larger_lane(&self.error(grid).1)
    }

    #[inline(always)]
    fn tighten(&self, error: f32, enough: f32) -> (Grid, f32) {
        let mut best = self.fit();
        let (squared, mut largest) = self.error(&best);
        let mut best_cost: f32 = cost(SUB, &squared, &largest, enough).iter().sum();
        // The sub-block that limits the superblock may change after one is improved.
        for _ in 0..4 {
            let worst = worst_lane(&largest);
            if largest[worst] <= enough {
                break;
            }
            let mut scales = [0.0; LANES];
            for s in 0..LANES {
                scales[s] = best.d.to_f32() * best.scales[s];
            }
            scales[worst] = self.smallest_largest_error(worst);
            let size = scales[worst].abs();
            let reach = scales.iter().fold(0.0, |a: f32, s| larger(a, s.abs()));
            let before = best_cost;
            // Halves are coarse against the steps of the outermost levels: several grid points are tried for the worst
            // sub-block, each with a step of its own. Only the negative side of the grid reaches 128.
            for below in 0..STEPS_TRIED {
                let sign = if below == 0 { -scales[worst].signum() } else { 1.0 };
                let point = larger((size * (128.0 - below as f32) / reach).floor(), 1.0);
                let (grid, grid_cost) = self.cheapest_on_grid(finite_half(sign * size / point), &scales, enough);
                if grid_cost < best_cost {
                    (best, best_cost) = (grid, grid_cost);
                }
            }
            if best_cost == before {
                break;
            }
            largest = self.error(&best).1;
        }
        (best, smaller(larger_lane(&largest), error))
    }

    #[inline(always)]
    fn assign(&self, grid: &Grid) -> Block {
        let mut out = Block { d: grid.d, scales: grid.scales.map(|v| v as i8), levels: [0; SUPERBLOCK] };
        for s in 0..LANES {
            let inv = inverse(grid.d.to_f32() * grid.scales[s]);
            for i in 0..SUB {
                out.levels[SUB * s + i] = (clamp(round(self.x[i][s] * inv), BOTTOM, TOP) - BOTTOM) as u8;
            }
        }
        out
    }
}

impl Symmetric {
    /// The best scale of every sub-block, not yet on the grid: the extreme weight lies at about level -32.
    #[inline(always)]
    fn search<const WEIGHTED: bool>(&self) -> Lanes {
        let mut size = [0.0; LANES];
        for s in 0..LANES {
            size[s] = self.extreme[s].abs();
        }
        let cap = larger_lane(&size) / 63.0;
        let (mut best, mut best_gain, mut per_extreme) = ([0.0; LANES], [0.0; LANES], [0.0; LANES]);
        for s in 0..LANES {
            best[s] = self.extreme[s] / BOTTOM;
            per_extreme[s] = inverse(self.extreme[s]);
        }
        for trial in 0..14 {
            let levels = -(31.1 + 0.15 * trial as f32);
            let mut inv = [0.0; LANES];
            for s in 0..LANES {
                inv[s] = levels * per_extreme[s];
            }
            let (mut sqq, mut sxq) = ([0.0f32; LANES], [0.0f32; LANES]);
            for i in 0..SUB {
                for s in 0..LANES {
                    let q = clamp(round(self.x[i][s] * inv[s]), BOTTOM, TOP);
                    let wq = if WEIGHTED { self.w[i][s] * q } else { q };
                    sqq[s] += wq * q;
                    sxq[s] += wq * self.x[i][s];
                }
            }
            for s in 0..LANES {
                // The squared error is the constant sum of w x^2 less this gain.
                let scale = sxq[s] * inverse(sqq[s]);
                let gain = scale * sxq[s];
                let step = scale.abs();
                let cut = larger(size[s] + BOTTOM * step, 0.5 * step);
                let better = (gain > best_gain[s]) & (cut <= cap);
                best_gain[s] = if better { gain } else { best_gain[s] };
                best[s] = if better { scale } else { best[s] };
            }
        }
        best
    }

    /// The nearest grid scales and their neighbours, whichever has the smallest error.
    #[inline(always)]
    fn on_grid(&self, d: Half, scales: &Lanes) -> Grid {
        let inv_d = inverse(d.to_f32());
        let mut nearest = [0.0; LANES];
        for s in 0..LANES {
            nearest[s] = clamp(round(scales[s] * inv_d), -128.0, 127.0);
        }
        let mut best = Grid { d, scales: nearest };
        let mut best_error = self.error(&best).0;
        for neighbour in [-1.0, 1.0] {
            let mut trial = best;
            for s in 0..LANES {
                trial.scales[s] = clamp(nearest[s] + neighbour, -128.0, 127.0);
            }
            let error = self.error(&trial).0;
            for s in 0..LANES {
                let better = error[s] < best_error[s];
                best_error[s] = if better { error[s] } else { best_error[s] };
                best.scales[s] = if better { trial.scales[s] } else { best.scales[s] };
            }
        }
        best
    }

    /// Weighted squared error and largest error of every sub-block on a grid.
    #[inline(always)]
    fn error(&self, grid: &Grid) -> (Lanes, Lanes) {
        let (mut scale, mut inv) = ([0.0; LANES], [0.0; LANES]);
        for s in 0..LANES {
            scale[s] = grid.d.to_f32() * grid.scales[s];
            inv[s] = inverse(scale[s]);
        }
        let (mut squared, mut largest) = ([0.0f32; LANES], [0.0f32; LANES]);
        for i in 0..SUB {
            for s in 0..LANES {
                let q = clamp(round(self.x[i][s] * inv[s]), BOTTOM, TOP);
                let error = scale[s] * q - self.x[i][s];
                squared[s] += self.w[i][s] * error * error;
                largest[s] = larger(largest[s], error.abs());
            }
        }
        (squared, largest)
    }

    /// The cheapest grid scales near `scales` for every sub-block, and their costs together.
    #[inline(always)]
    fn cheapest_on_grid(&self, d: Half, scales: &Lanes, enough: f32) -> (Grid, f32) {
        let inv_d = inverse(d.to_f32());
        let mut best = Grid { d, scales: [0.0; LANES] };
        let mut best_cost = [f32::MAX; LANES];
        for step in [0.0, -1.0, 1.0, -2.0, 2.0] {
            let mut trial = best;
            for s in 0..LANES {
                trial.scales[s] = clamp(round(scales[s] * inv_d) + step, -128.0, 127.0);
            }
            let (squared, largest) = self.error(&trial);
            let cost = cost(SUB, &squared, &largest, enough);
            for s in 0..LANES {
                let better = cost[s] < best_cost[s];
                best_cost[s] = if better { cost[s] } else { best_cost[s] };
                best.scales[s] = if better { trial.scales[s] } else { best.scales[s] };
            }
        }
        (best, best_cost.iter().sum())
    }

    /// The scale of one sub-block with the smallest largest error: 512 trials of either sign, a lane each.
    #[inline(always)]
    fn smallest_largest_error(&self, s: usize) -> f32 {
        let mut best = (f32::MAX, self.extreme[s] / BOTTOM);
        for group in 0..32 {
            let (mut scale, mut inv, mut largest) = ([0.0; LANES], [0.0; LANES], [0.0f32; LANES]);
            for lane in 0..LANES {
                let side = if group % 2 == 0 { BOTTOM } else { TOP };
                scale[lane] = self.extreme[s] / side * (1.015 - 0.03 / 255.0 * (LANES * (group / 2) + lane) as f32);
                inv[lane] = inverse(scale[lane]);
            }
            for i in 0..SUB {
                let x = self.x[i][s];
                for lane in 0..LANES {
                    let q = clamp(round(x * inv[lane]), BOTTOM, TOP);
                    largest[lane] = larger(largest[lane], (scale[lane] * q - x).abs());
                }
            }
            for lane in 0..LANES {
                if largest[lane] < best.0 {
                    best = (largest[lane], scale[lane]);
                }
            }
        }
        best.1
    }
}
