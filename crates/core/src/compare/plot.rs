//! KL divergence over the positions of a text, as an SVG picture.

use std::fmt::Write as _;

use super::ChunkedText;

const WIDTH: f64 = 960.0;
const HEIGHT: f64 = 360.0;
const LEFT: f64 = 70.0;
const RIGHT: f64 = 20.0;
const TOP: f64 = 40.0;
const BOTTOM: f64 = 50.0;
/// What is drawn below this, on the logarithmic axis, is drawn at the bottom.
const LOWEST: f64 = 1e-8;
/// Most points drawn; longer texts are thinned out by their largest values.
const MOST_POINTS: usize = 4000;

/// A picture of `kl` (one value per scored position): points on a logarithmic axis, the mean of each
/// chunk as a line.
pub fn kl_plot(title: &str, kl: &[f64], text: &ChunkedText) -> String {
    let scored = text.scored();
    let highest = kl.iter().copied().fold(LOWEST * 10.0, f64::max);
    let (low, high) = (LOWEST.log10(), highest.log10().ceil());
    let y = |value: f64| {
        let share = (value.max(LOWEST).log10() - low) / (high - low);
        HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)
    };
    let x = |share: f64| LEFT + share * (WIDTH - LEFT - RIGHT);
    let mut svg = String::new();
    // Writing to a String does not fail.
    let _ = write!(
        svg,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n<text x=\"{LEFT}\" y=\"22\" font-size=\"15\">{}</text>\n",
        escaped(title)
    );
    for exponent in low as i32..=high as i32 {
        let at = y(10f64.powi(exponent));
        let _ = writeln!(
            svg,
            "<line x1=\"{LEFT}\" x2=\"{}\" y1=\"{at:.1}\" y2=\"{at:.1}\" stroke=\"#ddd\"/><text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">1e{exponent}</text>",
            WIDTH - RIGHT,
            LEFT - 6.0,
            at + 4.0
        );
    }
    let step = kl.len().div_ceil(MOST_POINTS).max(1);
    for (i, part) in kl.chunks(step).enumerate() {
        let value = part.iter().copied().fold(0.0, f64::max);
        let position = x((i * step) as f64 / kl.len().max(1) as f64);
        let _ = writeln!(
            svg,
            "<circle cx=\"{position:.1}\" cy=\"{:.1}\" r=\"1.3\" fill=\"#4477aa\" fill-opacity=\"0.5\"/>",
            y(value)
        );
    }
    let mut line = String::new();
    for (i, chunk) in kl.chunks(scored.max(1)).enumerate() {
        let mean = chunk.iter().sum::<f64>() / chunk.len() as f64;
        let from = x((i * scored) as f64 / kl.len() as f64);
        let to = x((i * scored + chunk.len()) as f64 / kl.len() as f64);
        let _ = write!(line, "{from:.1},{0:.1} {to:.1},{0:.1} ", y(mean));
    }
    let _ = write!(
        svg,
        "<polyline points=\"{}\" fill=\"none\" stroke=\"#cc3311\" stroke-width=\"2\"/>\n\
         <text x=\"{}\" y=\"{}\" text-anchor=\"middle\">scored positions ({} of {} chunks of {} tokens); line: mean of each chunk</text>\n\
         <text x=\"16\" y=\"{}\" transform=\"rotate(-90 16 {})\" text-anchor=\"middle\">KL divergence (nats)</text>\n</svg>\n",
        line.trim_end(),
        (LEFT + WIDTH - RIGHT) / 2.0,
        HEIGHT - 14.0,
        kl.len(),
        text.chunks(),
        text.n_ctx,
        HEIGHT / 2.0,
        HEIGHT / 2.0
    );
    svg
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}
