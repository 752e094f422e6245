//! Finding tokens in a row of logits: the largest, the k largest, the shares of probability. Ties go to the lower id; a NaN
//! never wins.

/// Id of the largest logit; the lowest of equals. 0 if there is none above negative infinity.
pub(crate) fn argmax(logits: &[f32]) -> u32 {
    let largest = largest(logits);
    logits.iter().position(|&x| x == largest).unwrap_or(0) as u32
}

/// The largest logit; negative infinity if there is none.
pub(crate) fn largest(logits: &[f32]) -> f32 {
    const LANES: usize = 32;
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let chunks = logits.chunks_exact(LANES);
    let rest = chunks.remainder();
    for chunk in chunks {
        for (lane, &x) in lanes.iter_mut().zip(chunk) {
            *lane = if x > *lane { x } else { *lane };
        }
    }
    lanes.iter().chain(rest).fold(f32::NEG_INFINITY, |best, &x| if x > best { x } else { best })
}

/// Logarithm of the sum of exponentials, summed in f64 in a fixed order.
pub(crate) fn log_sum_exp(logits: &[f32]) -> f64 {
    let top = largest(logits);
    if top == f32::NEG_INFINITY {
        return f64::NEG_INFINITY;
    }
    const LANES: usize = 8;
    let mut lanes = [0f64; LANES];
    for chunk in logits.chunks(LANES) {
        for (lane, &x) in lanes.iter_mut().zip(chunk) {
            if x > f32::NEG_INFINITY {
                *lane += f64::from((x - top).exp());
            }
        }
    }
    f64::from(top) + lanes.iter().sum::<f64>().ln()
}

/// Order of candidates: larger logit first, then lower id.
pub(crate) fn before(a: &(f32, u32), b: &(f32, u32)) -> std::cmp::Ordering {
    b.0.total_cmp(&a.0).then(a.1.cmp(&b.1))
}

/// Puts the `k` largest of `logits` above negative infinity into `out`, largest first.
pub(crate) fn top_k(logits: &[f32], k: usize, out: &mut Vec<(f32, u32)>) {
    out.clear();
    if k == 0 {
        return;
    }
    // Collect up to 2k (at least a cache line's worth), then keep the best k and raise the bar.
    let room = (2 * k).max(64).min(logits.len().max(1));
    let mut bar = f32::NEG_INFINITY;
    for (id, &x) in logits.iter().enumerate() {
        if x > bar {
            if out.len() == room && room > k {
                out.select_nth_unstable_by(k - 1, before);
                out.truncate(k);
                bar = out[k - 1].0;
                if x <= bar {
                    continue;
                }
            }
            out.push((x, id as u32));
        }
    }
    if out.len() > k {
        out.select_nth_unstable_by(k - 1, before);
        out.truncate(k);
    }
    out.sort_unstable_by(before);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(n: usize, levels: u64) -> Vec<f32> {
        let mut x = 88172645463325252u64;
        (0..n)
            .map(|_| {
                x ^= x << 13;
                x ^= x >> 7;
                x ^= x << 17;
                (x % levels) as f32 * 0.25 - 3.0
            })
            .collect()
    }

    #[test]
    fn ties_go_to_the_lower_id_and_nan_never_wins() {
        let mut logits = vec![0.5; 100];
        logits[40] = 2.0;
        logits[71] = 2.0;
        logits[3] = f32::NAN;
        logits[99] = f32::NAN;
        assert_eq!(argmax(&logits), 40);
        assert_eq!(argmax(&[f32::NAN, 1.0]), 1);
        assert_eq!(argmax(&[f32::NEG_INFINITY; 5]), 0);
        let mut top = Vec::new();
        top_k(&logits, 4, &mut top);
        assert_eq!(top, [(2.0, 40), (2.0, 71), (0.5, 0), (0.5, 1)]);
    }

    #[test]
    fn top_k_equals_a_full_sort() {
        for levels in [3, 50, 1 << 40] {
            for n in [1, 7, 64, 1000, 5000] {
                let logits = row(n, levels);
                let mut sorted: Vec<_> = logits.iter().enumerate().map(|(id, &x)| (x, id as u32)).collect();
                sorted.sort_by(before);
                for k in [1, 5, 40, 64, 999, 6000] {
                    let mut top = Vec::new();
                    top_k(&logits, k, &mut top);
                    assert_eq!(top, sorted[..k.min(n)], "{levels} levels, n {n}, k {k}");
                }
            }
        }
    }

    #[test]
    fn log_sum_exp_ignores_forbidden_tokens() {
        let value = log_sum_exp(&[1000.0, f32::NEG_INFINITY, 1000.0]);
        assert!((value - (1000.0 + 2f64.ln())).abs() < 1e-9);
        assert_eq!(log_sum_exp(&[f32::NEG_INFINITY]), f64::NEG_INFINITY);
    }
}
