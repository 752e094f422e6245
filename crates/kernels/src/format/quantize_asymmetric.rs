//! The quantizer of `Q4_K` and `Q5_K`: sub-blocks of 32 weights stored as `scale * q - min` with `q` in `0..=LEVELS`.
//!
//! Per superblock ([`super::quantize_fit`] has what surrounds it):
//! 1. for a row of trial scales, round the weights and solve the weighted least squares for (scale, min); keep the fit
//!    with the smallest squared error whose extremes stay within the error a plain range fit would have;
//! 2. round scales and minima to the 6-bit grid of the superblock, and try the neighbouring grid scales with the
//!    minimum that suits each;
//! 3. over all superblocks of the call: take the one with the largest error and refit its worst sub-block for the
//!    smallest largest error, until the worst one cannot be improved.

use super::blocks::{Half, SUPERBLOCK};
use super::quantize_fit::{
    Columns, Superblock, clamp, columns, cost, finite_half, importance_columns, inverse, larger, larger_lane, round,
    smaller, worst_lane,
};

/// Sub-blocks of a superblock: one lane each.
const LANES: usize = 8;
/// Weights of a sub-block.
const SUB: usize = 32;
/// Largest 6-bit scale or minimum.
const GRID: f32 = 63.0;
/// Most a fit may cut off, in half steps of a plain range fit of the widest sub-block.
const CAP: f32 = 1.3;
/// One value per sub-block.
type Lanes = [f32; LANES];
/// A fitted superblock: weight `i` of sub-block `s` is `d * scales[s] * q[i][s] - dmin * mins[s]`.
#[derive(Clone, Copy)]
pub(super) struct Block {
    pub d: Half,
    pub dmin: Half,
    pub scales: [u8; LANES],
    pub mins: [u8; LANES],
    /// `[32 * s + i]`: level of weight `i` of sub-block `s`.
    pub levels: [u8; SUPERBLOCK],
}

/// The grid of a superblock before the levels are assigned.
#[derive(Clone, Copy)]
pub(super) struct Grid {
    d: Half,
    dmin: Half,
    scales: Lanes,
    mins: Lanes,
}

/// Steps of (scale, min) on the grid tried around a sub-block's wish when the largest error is pulled down.
const GRID_NEIGHBOURS: [(f32, f32); 9] =
    [(0.0, 0.0), (0.0, -1.0), (0.0, 1.0), (-1.0, 0.0), (-1.0, -1.0), (-1.0, 1.0), (1.0, 0.0), (1.0, -1.0), (1.0, 1.0)];

/// Superblock steps at which `value` lies on a grid point, the grid still reaching `largest`: the step of the highest
/// such point, of the two below, and the old step.
#[inline(always)]
fn grid_steps(value: f32, largest: f32, old: Half) -> [Half; 4] {
    if value <= 0.0 {
        return [old; 4];
    }
    let highest = (value * GRID / larger(largest, value)).floor();
    [0.0, 1.0, 2.0, 3.0].map(|below| if below == 3.0 { old } else { finite_half(value / larger(highest - below, 1.0)) })
}

/// One superblock to be fitted with levels `0..=LEVELS`.
pub(super) struct Asymmetric<const LEVELS: usize> {
    /// The weights.
    x: Columns<LANES, SUB>,
    /// Their importance (all ones without an importance matrix).
    w: Columns<LANES, SUB>,
    weighted: bool,
    /// Smallest weight of each sub-block, at most 0 (a minimum is subtracted, so it cannot lift a sub-block).
    low: Lanes,
    /// Distance from `low` to the largest weight.
    range: Lanes,
}

impl<const LEVELS: usize> Superblock for Asymmetric<LEVELS> {
    type Grid = Grid;
    type Block = Block;
    // Below what ggml's quantizer reaches, and not so far that it takes long.
    const ENOUGH: f32 = if LEVELS == 15 { 0.90 } else { 0.94 };
    const STEPS: f32 = LEVELS as f32;

    #[inline(always)]
    fn new(weights: &[f32; SUPERBLOCK], importance: Option<&[f32]>) -> Self {
        let x = columns(weights);
        let (mut low, mut high) = ([0.0f32; LANES], [f32::MIN; LANES]);
        for column in &x {
            for s in 0..LANES {
                low[s] = smaller(low[s], column[s]);
                high[s] = larger(high[s], column[s]);
            }
        }
        let mut range = [0.0; LANES];
        for s in 0..LANES {
            range[s] = high[s] - low[s];
        }
        Asymmetric { x, w: importance_columns(importance), weighted: importance.is_some(), low, range }
    }

    #[inline(always)]
    fn reach(&self) -> f32 {
        larger_lane(&self.range)
    }

    /// Steps 1 and 2.
    #[inline(always)]
    fn fit(&self) -> Grid {
        let (scales, mins) = if self.weighted { self.search::<true>() } else { self.search::<false>() };
        let d = finite_half(larger_lane(&scales) / GRID);
        let dmin = finite_half(larger_lane(&mins) / GRID);
        let grid = self.on_grid(d, dmin, &scales, &mins);
        self.refit_steps(grid)
    }

    #[inline(always)]
    fn largest_error(&self, grid: &Grid) -> f32 {
        larger_lane(&self.error(grid).1)
    }

    /// Step 3.
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
            let (scale, min) = self.smallest_largest_error(worst);
            let (mut scales, mut mins) = ([0.0; LANES], [0.0; LANES]);
            for s in 0..LANES {
                scales[s] = if s == worst { scale } else { best.d.to_f32() * best.scales[s] };
                mins[s] = if s == worst { min } else { best.dmin.to_f32() * best.mins[s] };
            }
            let before = best_cost;
            for d in grid_steps(scale, larger_lane(&scales), best.d) {
                for dmin in grid_steps(min, larger_lane(&mins), best.dmin) {
                    let (grid, grid_cost) = self.cheapest_on_grid(d, dmin, &scales, &mins, enough);
                    if grid_cost < best_cost {
                        (best, best_cost) = (grid, grid_cost);
                    }
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
        let mut out = Block {
            d: grid.d,
            dmin: grid.dmin,
            scales: grid.scales.map(|v| v as u8),
            mins: grid.mins.map(|v| v as u8),
            levels: [0; SUPERBLOCK],
        };
        for s in 0..LANES {
            let inv = inverse(grid.d.to_f32() * grid.scales[s]);
            let min = grid.dmin.to_f32() * grid.mins[s];
            for i in 0..SUB {
                out.levels[SUB * s + i] = clamp(round((self.x[i][s] + min) * inv), 0.0, Self::TOP) as u8;
            }
        }
        out
    }
}

impl<const LEVELS: usize> Asymmetric<LEVELS> {
    const TOP: f32 = LEVELS as f32;

    /// The least-squares (d, dmin) of a grid's levels, when that lowers the squared error.
    #[inline(always)]
    fn refit_steps(&self, grid: Grid) -> Grid {
        let (mut scale, mut min, mut inv) = ([0.0; LANES], [0.0; LANES], [0.0; LANES]);
        for s in 0..LANES {
            scale[s] = grid.d.to_f32() * grid.scales[s];
            min[s] = grid.dmin.to_f32() * grid.mins[s];
            inv[s] = inverse(scale[s]);
        }
        // x is to be d * a - dmin * m with a = scales * q.
        let (mut aa, mut am, mut mm) = ([0.0f32; LANES], [0.0f32; LANES], [0.0f32; LANES]);
        let (mut xa, mut xm) = ([0.0f32; LANES], [0.0f32; LANES]);
        for i in 0..SUB {
            for s in 0..LANES {
                let a = grid.scales[s] * clamp(round((self.x[i][s] + min[s]) * inv[s]), 0.0, Self::TOP);
                let (wa, wm) = (self.w[i][s] * a, self.w[i][s] * grid.mins[s]);
                aa[s] += wa * a;
                am[s] += wa * grid.mins[s];
                mm[s] += wm * grid.mins[s];
                xa[s] += wa * self.x[i][s];
                xm[s] += wm * self.x[i][s];
            }
        }
        let [aa, am, mm, xa, xm] = [aa, am, mm, xa, xm].map(|lanes| lanes.iter().map(|&v| f64::from(v)).sum::<f64>());
        let det = aa * mm - am * am;
        let (d, dmin) = if mm > 0.0 { ((xa * mm - xm * am) / det, (xa * am - xm * aa) / det) } else { (xa / aa, 0.0) };
        if !(d > 0.0 && dmin >= 0.0) {
            return grid;
        }
        let refit = Grid { d: finite_half(d as f32), dmin: finite_half(dmin as f32), ..grid };
        let total = |grid: &Grid| self.error(grid).0.iter().sum::<f32>();
        if total(&refit) < total(&grid) { refit } else { grid }
    }

    /// The best (scale, min) of every sub-block, not yet on the grid.
    #[inline(always)]
    fn search<const WEIGHTED: bool>(&self) -> (Lanes, Lanes) {
        let top = Self::TOP;
        // Trial scales: `range / (top + delta)`. Below -0.5 the top level goes unused, above +1 the extremes are cut.
        let (first, step, steps) = if LEVELS == 15 { (-0.9, 0.15, 14) } else { (-0.9, 0.15, 12) };
        let cap = CAP * larger_lane(&self.range) / (2.0 * top);
        let mut y = self.x;
        let (mut sw, mut sy, mut syy) = ([0.0f32; LANES], [0.0f32; LANES], [0.0f32; LANES]);
        for i in 0..SUB {
            for s in 0..LANES {
                let v = self.x[i][s] - self.low[s];
                let w = if WEIGHTED { self.w[i][s] } else { 1.0 };
                y[i][s] = v;
                sw[s] += w;
                sy[s] += w * v;
                syy[s] += w * v * v;
            }
        }
        let (mut best_scale, mut best_offset, mut best_error) = ([0.0; LANES], [0.0; LANES], [f32::MAX; LANES]);
        let mut per_range = [0.0; LANES];
        for s in 0..LANES {
            per_range[s] = inverse(self.range[s]);
            best_scale[s] = self.range[s] / top;
        }
        for trial in 0..steps {
            let levels = top + first + step * trial as f32;
            let mut inv = [0.0; LANES];
            for s in 0..LANES {
                inv[s] = levels * per_range[s];
            }
            let (mut sq, mut sqq, mut syq) = ([0.0f32; LANES], [0.0f32; LANES], [0.0f32; LANES]);
            for i in 0..SUB {
                for s in 0..LANES {
                    // y >= 0, so the level is never negative.
                    let q = smaller(round(y[i][s] * inv[s]), top);
                    if WEIGHTED {
                        let wq = self.w[i][s] * q;
                        sq[s] += wq;
                        sqq[s] += wq * q;
                        syq[s] += wq * y[i][s];
                    } else {
                        sq[s] += q;
                        sqq[s] += q * q;
                        syq[s] += q * y[i][s];
                    }
                }
            }
            for s in 0..LANES {
                let det = inverse(sw[s] * sqq[s] - sq[s] * sq[s]);
                let free_scale = (sw[s] * syq[s] - sy[s] * sq[s]) * det;
                let free_offset = (sqq[s] * sy[s] - sq[s] * syq[s]) * det;
                // The offset of x is low + offset and must not be positive.
                let offset = smaller(free_offset, -self.low[s]);
                let held = free_offset > -self.low[s];
                let scale = if held { (syq[s] - offset * sq[s]) * inverse(sqq[s]) } else { free_scale };
                let error = syy[s] - 2.0 * (scale * syq[s] + offset * sy[s])
                    + scale * (scale * sqq[s] + 2.0 * offset * sq[s])
                    + offset * offset * sw[s];
                let cut = larger(larger(offset, self.range[s] - top * scale - offset), 0.5 * scale);
                let better = (error < best_error[s]) & (cut <= cap) & (det > 0.0);
                best_error[s] = if better { error } else { best_error[s] };
                best_scale[s] = if better { scale } else { best_scale[s] };
                best_offset[s] = if better { offset } else { best_offset[s] };
            }
        }
        let mut mins = [0.0; LANES];
        for s in 0..LANES {
            mins[s] = larger(-(self.low[s] + best_offset[s]), 0.0);
        }
        (best_scale, mins)
    }

    /// Rounds scales and minima to the grid `(d, dmin)`: for each sub-block the nearest grid scale and its neighbours are
    /// tried, each with the minimum that suits it.
    #[inline(always)]
    fn on_grid(&self, d: Half, dmin: Half, scales: &Lanes, mins: &Lanes) -> Grid {
        let (inv_d, inv_dmin) = (inverse(d.to_f32()), inverse(dmin.to_f32()));
        let mut best = Grid { d, dmin, scales: [0.0; LANES], mins: [0.0; LANES] };
        let mut nearest = [0.0; LANES];
        for s in 0..LANES {
            nearest[s] = smaller(round(scales[s] * inv_d), GRID);
            best.mins[s] = smaller(round(mins[s] * inv_dmin), GRID);
        }
        best.scales = nearest;
        let mut best_error = self.error(&best).0;
        for neighbour in [0.0, -1.0, 1.0] {
            let mut trial = best;
            for s in 0..LANES {
                trial.scales[s] = clamp(nearest[s] + neighbour, 0.0, GRID);
            }
            trial.mins = self.suited_mins(&trial, mins);
            let error = self.error(&trial).0;
            for s in 0..LANES {
                let better = error[s] < best_error[s];
                best_error[s] = if better { error[s] } else { best_error[s] };
                best.scales[s] = if better { trial.scales[s] } else { best.scales[s] };
                best.mins[s] = if better { trial.mins[s] } else { best.mins[s] };
            }
        }
        best
    }

    /// The grid minima that suit the grid scales, given levels assigned with the unrounded minima.
    #[inline(always)]
    fn suited_mins(&self, grid: &Grid, mins: &Lanes) -> Lanes {
        let (mut scale, mut inv) = ([0.0; LANES], [0.0; LANES]);
        for s in 0..LANES {
            scale[s] = grid.d.to_f32() * grid.scales[s];
            inv[s] = inverse(scale[s]);
        }
        let (mut sum, mut sw) = ([0.0f32; LANES], [0.0f32; LANES]);
        for i in 0..SUB {
            for s in 0..LANES {
                let q = clamp(round((self.x[i][s] + mins[s]) * inv[s]), 0.0, Self::TOP);
                sum[s] += self.w[i][s] * (scale[s] * q - self.x[i][s]);
                sw[s] += self.w[i][s];
            }
        }
        let inv_dmin = inverse(grid.dmin.to_f32());
        let mut out = [0.0; LANES];
        for s in 0..LANES {
            out[s] = clamp(round(sum[s] * inverse(sw[s]) * inv_dmin), 0.0, GRID);
        }
        out
    }

    /// Weighted squared error and largest error of every sub-block on a grid.
    #[inline(always)]
    fn error(&self, grid: &Grid) -> (Lanes, Lanes) {
        let (mut scale, mut min, mut inv) = ([0.0; LANES], [0.0; LANES], [0.0; LANES]);
        for s in 0..LANES {
            scale[s] = grid.d.to_f32() * grid.scales[s];
            min[s] = grid.dmin.to_f32() * grid.mins[s];
            inv[s] = inverse(scale[s]);
        }
        let (mut squared, mut largest) = ([0.0f32; LANES], [0.0f32; LANES]);
        for i in 0..SUB {
            for s in 0..LANES {
                let q = clamp(round((self.x[i][s] + min[s]) * inv[s]), 0.0, Self::TOP);
                let error = scale[s] * q - min[s] - self.x[i][s];
                squared[s] += self.w[i][s] * error * error;
                largest[s] = larger(largest[s], error.abs());
            }
        }
        (squared, largest)
    }

    /// The cheapest grid points near (scales, mins) for every sub-block, and their costs together.
    #[inline(always)]
    fn cheapest_on_grid(&self, d: Half, dmin: Half, scales: &Lanes, mins: &Lanes, enough: f32) -> (Grid, f32) {
        let (inv_d, inv_dmin) = (inverse(d.to_f32()), inverse(dmin.to_f32()));
        let mut best = Grid { d, dmin, scales: [0.0; LANES], mins: [0.0; LANES] };
        let mut best_cost = [f32::MAX; LANES];
        for (scale_step, min_step) in GRID_NEIGHBOURS {
            let mut trial = best;
            for s in 0..LANES {
                trial.scales[s] = clamp(round(scales[s] * inv_d) + scale_step, 0.0, GRID);
                trial.mins[s] = clamp(round(mins[s] * inv_dmin) + min_step, 0.0, GRID);
            }
            let (squared, largest) = self.error(&trial);
            let cost = cost(SUB, &squared, &largest, enough);
            for s in 0..LANES {
                let better = cost[s] < best_cost[s];
                best_cost[s] = if better { cost[s] } else { best_cost[s] };
                best.scales[s] = if better { trial.scales[s] } else { best.scales[s] };
                best.mins[s] = if better { trial.mins[s] } else { best.mins[s] };
            }
        }
        (best, best_cost.iter().sum())
    }

    /// The (scale, min) of one sub-block with the smallest largest error, by trying scales (a lane each) and offsets.
    #[inline(always)]
    fn smallest_largest_error(&self, s: usize) -> (f32, f32) {
        let (top, range) = (Self::TOP, self.range[s]);
        let mut best = (f32::MAX, range / top, -self.low[s]);
        for group in 0..8 {
            let (mut scale, mut inv) = ([0.0; LANES], [0.0; LANES]);
            for lane in 0..LANES {
                // From no cut at all to a cut of half a step at both ends.
                scale[lane] = range / (top - 0.2 + 1.4 / 63.0 * (LANES * group + lane) as f32);
                inv[lane] = inverse(scale[lane]);
            }
            for shift in 0..17 {
                let (mut largest, mut min) = ([0.0f32; LANES], [0.0; LANES]);
                for lane in 0..LANES {
                    // What the levels do not cover is shared between the two ends.
                    let slack = range - top * scale[lane];
                    min[lane] = larger(-self.low[s] - slack * shift as f32 / 16.0, 0.0);
                }
                for i in 0..SUB {
                    for lane in 0..LANES {
                        let x = self.x[i][s];
                        let q = clamp(round((x + min[lane]) * inv[lane]), 0.0, top);
                        largest[lane] = larger(largest[lane], (scale[lane] * q - min[lane] - x).abs());
                    }
                }
                for lane in 0..LANES {
                    if largest[lane] < best.0 {
                        best = (largest[lane], scale[lane], min[lane]);
                    }
                }
            }
        }
        (best.1, best.2)
    }
}
