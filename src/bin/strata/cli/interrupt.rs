//! Ctrl-C and termination. A command that asks ([`Interrupt::catch`]) ends by itself after the first signal and is ended by a
//! second one; any other is ended by the first. Neither leaves a half-written file.

use super::failure::INTERRUPTED;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Whether the user asked to stop.
#[derive(Clone)]
pub struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    /// Catches SIGINT and SIGTERM from now on. If they cannot be caught, they end the process as usual.
    pub fn catch() -> Self {
        let flag = Arc::new(AtomicBool::new(false));
        let seen = flag.clone();
        on_signal(move || {
            if seen.swap(true, Ordering::Relaxed) {
                end();
            }
        });
        Interrupt(flag)
    }

    /// True once a signal came.
    pub fn pending(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// Forgets a signal that was acted on.
    pub fn clear(&self) {
        self.0.store(false, Ordering::Relaxed);
    }
}

/// For commands that do not ask: a signal removes their unfinished outputs and ends the process.
pub fn end_on_signal() {
    on_signal(|| end());
}

fn on_signal(mut act: impl FnMut() + Send + 'static) {
    let Ok(mut signals) = Signals::new([SIGINT, SIGTERM]) else { return };
    // A machine that cannot start this thread cannot start those that compute either.
    let _ =
        std::thread::Builder::new().name("strata-signals".into()).spawn(move || signals.forever().for_each(|_| act()));
}

fn end() -> ! {
    let removed = strata_core::output::remove_unfinished_files();
    strata::errln!("strata: interrupted{}", if removed > 0 { "; unfinished files were removed" } else { "" });
    std::process::exit(i32::from(INTERRUPTED));
}
