//! The counter-based generator: a draw depends on (seed, position) alone, so a token comes out the same whatever window,
//! batch or draft it was sampled in.

/// A number in [0, 1) for the row at `position`, from two rounds of the SplitMix64 finaliser (Steele, Lea, Flood 2014).
pub(crate) fn draw(seed: u64, position: u64) -> f64 {
    let keyed = mix(mix(seed.wrapping_add(GOLDEN)) ^ position.wrapping_mul(GOLDEN).wrapping_add(GOLDEN));
    (keyed >> 11) as f64 / (1u64 << 53) as f64
}

/// 2^64 divided by the golden ratio, SplitMix64's increment.
const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_are_even_over_positions_and_over_seeds() {
        for by_seed in [false, true] {
            let mut bins = [0u32; 16];
            for i in 0..16_000u64 {
                let x = if by_seed { draw(i, 7) } else { draw(7, i) };
                bins[(x * 16.0) as usize] += 1;
            }
            // 1000 expected per bin, standard deviation 31: six of them.
            assert!(bins.iter().all(|&n| (814..1186).contains(&n)), "{bins:?}");
        }
    }

    #[test]
    fn neighbouring_draws_do_not_follow_each_other() {
        let mut above = 0;
        for i in 0..10_000u64 {
            above += u32::from((draw(3, i) < 0.5) == (draw(3, i + 1) < 0.5));
        }
        assert!((4_700..5_300).contains(&above), "{above}");
    }
}
