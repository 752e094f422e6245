//! Progress bars: on a terminal only, on stderr.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::IsTerminal;

/// A bar that counts bytes.
pub fn bytes(total: u64, what: &'static str) -> ProgressBar {
    bar(total, what, "{msg:>12} [{wide_bar}] {bytes}/{total_bytes} {bytes_per_sec} {eta}")
}

/// A bar that counts things.
pub fn count(total: u64, what: &'static str) -> ProgressBar {
    bar(total, what, "{msg:>12} [{wide_bar}] {pos}/{len} {eta}")
}

fn bar(total: u64, what: &'static str, template: &str) -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr_with_hz(10));
    let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
    bar.with_style(style.progress_chars("=> ")).with_message(what)
}
