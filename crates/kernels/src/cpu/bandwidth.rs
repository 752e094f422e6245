//! How fast this machine reads memory: the ceiling of decoding, where every token streams the active weights.

use super::Pool;
use std::time::{Duration, Instant};

/// Bytes read per pass: well past the last-level cache's share of one core.
const BUFFER: usize = 192 << 20;
/// Bytes per task, small enough to even out an interrupted thread.
const PART: usize = 1 << 20;
/// When to stop measuring.
const TIME_LIMIT: Duration = Duration::from_millis(60);

/// Measured read bandwidth in bytes per second, with all threads of the pool reading at once.
///
/// Takes about 100 ms and 192 MiB (given back before it returns). The best of a few passes counts, because whatever else
/// runs on the machine only ever makes a pass slower. Call it once and keep the result.
pub fn measure(pool: &Pool) -> f64 {
    // Filled with something else than zeros, so that every page is backed by memory of its own.
    let buffer = vec![1u64; BUFFER / 8];
    let mut best = f64::INFINITY;
    let start = Instant::now();
    loop {
        let pass = Instant::now();
        pool.run(BUFFER / PART, &|task| {
            let part = &buffer[task * (PART / 8)..][..PART / 8];
            std::hint::black_box(sum(part));
        });
        best = best.min(pass.elapsed().as_secs_f64());
        if start.elapsed() > TIME_LIMIT {
            return BUFFER as f64 / best;
        }
    }
}

/// A sum in as many independent accumulators as the compiler needs to keep the loads in flight.
fn sum(part: &[u64]) -> u64 {
    let mut sums = [0u64; 32];
    for chunk in part.as_chunks::<32>().0 {
        for (sum, value) in sums.iter_mut().zip(chunk) {
            *sum = sum.wrapping_add(*value);
        }
    }
    sums.iter().fold(0, |a, b| a.wrapping_add(*b))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_measured_bandwidth_is_one_a_machine_can_have() {
        let bandwidth = measure(&Pool::new(2));
        assert!((1e8..1e13).contains(&bandwidth), "{bandwidth}");
    }
}
