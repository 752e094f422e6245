//! Ctrl-C and termination: the first signal asks the command to end, a second one ends the process.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Whether the user asked to stop.
#[derive(Clone)]
pub struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    /// Catches SIGINT and SIGTERM from now on. If they cannot be caught, they end the process as usual.
    pub fn catch() -> Self {
        let flag = Arc::new(AtomicBool::new(false));
        for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
            // Order matters: the second signal finds the flag set and exits; the first only sets it.
            let _ = signal_hook::flag::register_conditional_shutdown(
                signal,
                i32::from(super::failure::INTERRUPTED),
                flag.clone(),
            );
            let _ = signal_hook::flag::register(signal, flag.clone());
        }
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
