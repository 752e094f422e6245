//! Perplexity of a text and KL divergence from a reference, over the scored positions of its chunks, with the
//! statistics `llama-perplexity` prints.

use super::{BaseWriter, ChunkedText, CompareError, Figures, LogProbs, Source};

/// Positions computed at a time; the logits of a window are kept for so many rows.
const ROWS: usize = 16;

/// Log-probabilities below this in a saved file carry no information (they were cut off when it was written).
const SAVED_FLOOR: f64 = -16.0;

/// Negative log-likelihood of a text, summed.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Perplexity {
    sum: f64,
    sum_of_squares: f64,
    positions: usize,
}

impl Perplexity {
    fn add(&mut self, nll: f64) {
        self.sum += nll;
        self.sum_of_squares += nll * nll;
        self.positions += 1;
    }

    /// Mean negative log-likelihood and its standard error.
    pub fn nll(&self) -> (f64, f64) {
        mean_and_error(self.sum, self.sum_of_squares, self.positions)
    }

    /// Perplexity and its standard error.
    pub fn perplexity(&self) -> (f64, f64) {
        let (nll, error) = self.nll();
        (nll.exp(), nll.exp() * error)
    }

    /// Number of positions.
    pub fn positions(&self) -> usize {
        self.positions
    }
}

fn mean_and_error(sum: f64, sum_of_squares: f64, count: usize) -> (f64, f64) {
    if count == 0 {
        return (0.0, 0.0);
    }
    let n = count as f64;
    let mean = sum / n;
    let variance = sum_of_squares / n - mean * mean;
    (mean, if count > 1 && variance > 0.0 { (variance / (n - 1.0)).sqrt() } else { 0.0 })
}

/// `KL(base || tested)` of one position, in nats.
pub fn kl_divergence(base: &LogProbs, tested: &LogProbs) -> f64 {
    let mut sum = 0.0;
    for (&b, &t) in base.values.iter().zip(&tested.values) {
        let b = f64::from(b) - base.log_sum;
        if base.truncated && b <= SAVED_FLOOR {
            continue;
        }
        let probability = b.exp();
        if probability > 0.0 {
            sum += probability * (b - (f64::from(t) - tested.log_sum));
        }
    }
    // It cannot be negative; only rounding makes it so, and a saved file's steps.
    if base.truncated || tested.truncated { sum } else { sum.max(0.0) }
}

/// What a comparison of two sources found.
#[derive(Debug, Clone, Default)]
pub struct Divergence {
    /// The tested side.
    pub tested: Perplexity,
    /// The reference.
    pub base: Perplexity,
    /// KL divergence of every scored position in order, in nats.
    pub kl: Vec<f64>,
    /// Difference of the probability of the text's next token, tested minus reference, per position.
    pub p_diff: Vec<f64>,
    /// Positions whose most likely token is the same.
    pub same_top: usize,
    /// Mean KL divergence of a second reference run from the reference: what cannot be told from noise.
    pub noise: Option<f64>,
    product: f64,
    noise_sum: f64,
}

/// Reads all chunks of `text` through `tested` and, where given, `base` (the reference) and `noise` (a second run of the
/// reference); `save` gets the log-probabilities of `tested`. `progress` is told the chunks done.
///
/// # Errors
/// [`CompareError`] from the model or a file, or of vocabularies that differ in size.
pub fn measure(
    text: &ChunkedText,
    tested: &mut Source<'_>,
    mut base: Option<&mut Source<'_>>,
    mut noise: Option<&mut Source<'_>>,
    mut save: Option<&mut BaseWriter>,
    progress: &mut dyn FnMut(usize, &Divergence),
) -> Result<Divergence, CompareError> {
    let mut result = Divergence::default();
    let (mut rows, mut base_rows, mut noise_rows) = (Vec::new(), Vec::new(), Vec::new());
    for index in 0..text.chunks() {
        let chunk = text.chunk(index);
        tested.begin(text, index)?;
        if let Some(base) = &mut base {
            base.begin(text, index)?;
        }
        if let Some(noise) = &mut noise {
            noise.begin(text, index)?;
        }
        let last = text.first() + text.scored();
        for from in (text.first()..last).step_by(ROWS) {
            let to = (from + ROWS).min(last);
            let tokens = &chunk[from..to];
            tested.next(tokens, &mut rows)?;
            if let Some(base) = &mut base {
                base.next(tokens, &mut base_rows)?;
            }
            if let Some(noise) = &mut noise {
                noise.next(tokens, &mut noise_rows)?;
            }
            for i in 0..tokens.len() {
                let next = chunk[from + i + 1];
                if let Some(save) = &mut save {
                    save.write(&rows[i])?;
                }
                let second = noise.is_some().then(|| &noise_rows[i]);
                match &base {
                    Some(_) => result.add(&rows[i], &base_rows[i], second, next)?,
                    None => result.tested.add(-rows[i].log_prob(next)),
                }
            }
        }
        progress(index + 1, &result);
    }
    if noise.is_some() {
        result.noise = Some(result.noise_sum / result.kl.len() as f64);
    }
    Ok(result)
}

impl Divergence {
    fn add(
        &mut self,
        tested: &LogProbs,
        base: &LogProbs,
        noise: Option<&LogProbs>,
        next: u32,
    ) -> Result<(), CompareError> {
        let vocabularies = [Some(tested), noise].into_iter().flatten().map(|side| side.values.len());
        for vocab in vocabularies {
            if vocab != base.values.len() {
                return Err(CompareError::Input(format!(
                    "vocabularies of {vocab} and {} tokens cannot be compared",
                    base.values.len()
                )));
            }
        }
        let (t, b) = (tested.log_prob(next), base.log_prob(next));
        self.tested.add(-t);
        self.base.add(-b);
        self.product += t * b;
        self.kl.push(kl_divergence(base, tested));
        self.p_diff.push(t.exp() - b.exp());
        self.same_top += usize::from(tested.top() == base.top());
        self.noise_sum += noise.map_or(0.0, |noise| kl_divergence(base, noise));
        Ok(())
    }

    /// Mean KL divergence and its standard error, in nats.
    pub fn mean_kl(&self) -> (f64, f64) {
        mean_and_error(self.kl.iter().sum(), self.kl.iter().map(|kl| kl * kl).sum(), self.kl.len())
    }

    /// Share of positions with the same most likely token.
    pub fn top_agreement(&self) -> f64 {
        self.same_top as f64 / self.kl.len().max(1) as f64
    }

    /// All figures, for a report.
    pub fn figures(&self) -> Figures {
        let mut figures = Figures::default();
        let (perplexity, error) = self.tested.perplexity();
        figures.add("positions", "positions scored", self.tested.positions as f64, "");
        figures.add("perplexity", "perplexity", perplexity, "");
        figures.add("perplexity_error", "  standard error", error, "");
        if self.kl.is_empty() {
            return figures;
        }
        let (base, base_error) = self.base.perplexity();
        figures.add("reference_perplexity", "perplexity of the reference", base, "");
        figures.add("reference_perplexity_error", "  standard error", base_error, "");
        let ((t, t_error), (b, b_error)) = (self.tested.nll(), self.base.nll());
        let n = self.kl.len() as f64;
        let covariance = if self.kl.len() > 1 { (self.product / n - t * b) / (n - 1.0) } else { 0.0 };
        figures.add("log_perplexity_ratio", "ln(perplexity / reference)", t - b, "");
        let ratio_variance = t_error * t_error + b_error * b_error - 2.0 * covariance;
        figures.add("log_perplexity_ratio_error", "  standard error", ratio_variance.max(0.0).sqrt(), "");
        let (kl, kl_error) = self.mean_kl();
        figures.add("kl_mean", "KL divergence, mean", kl, "nats");
        figures.add("kl_error", "  standard error", kl_error, "nats");
        let sorted = sorted(&self.kl);
        for (name, label, share) in [
            ("kl_min", "  minimum", 0.0),
            ("kl_1", "  1%", 0.01),
            ("kl_10", "  10%", 0.1),
            ("kl_median", "  median", 0.5),
            ("kl_90", "  90%", 0.9),
            ("kl_95", "  95%", 0.95),
            ("kl_99", "  99%", 0.99),
            ("kl_99_9", "  99.9%", 0.999),
            ("kl_max", "  maximum", 1.0),
        ] {
            figures.add(name, label, percentile(&sorted, share), "nats");
        }
        if let Some(noise) = self.noise {
            figures.add("noise_kl_mean", "noise floor (second reference), mean KL", noise, "nats");
            figures.add("kl_over_noise", "  mean KL / noise floor", kl / noise, "");
        }
        let same = self.top_agreement();
        figures.add("same_top", "same most likely token", 100.0 * same, "%");
        figures.add(
            "same_top_error",
            "  standard error",
            100.0 * (same * (1.0 - same) / (n - 1.0).max(1.0)).sqrt(),
            "%",
        );
        let mean = self.p_diff.iter().sum::<f64>() / n;
        let square = self.p_diff.iter().map(|p| p * p).sum::<f64>() / n;
        figures.add("p_diff_mean", "probability of the next token, mean difference", 100.0 * mean, "%");
        figures.add("p_diff_rms", "  root mean square", 100.0 * square.sqrt(), "%");
        let largest = self.p_diff.iter().fold(0.0, |most: f64, p| most.max(p.abs()));
        figures.add("p_diff_max", "  largest", 100.0 * largest, "%");
        figures
    }
}

fn sorted(values: &[f64]) -> Vec<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted
}

/// Linear between the two nearest of the sorted values, as llama-perplexity does.
fn percentile(sorted: &[f64], share: f64) -> f64 {
    let Some(last) = sorted.len().checked_sub(1) else { return 0.0 };
    let at = share * last as f64;
    let low = at.floor() as usize;
    let part = at - low as f64;
    (1.0 - part) * sorted[low] + part * sorted[(low + 1).min(last)]
}
