//! Where the time of forward passes goes.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Parts of a forward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Embedding rows and rope angles.
    Embed,
    /// Attention layers of the trunk, without experts.
    Attention,
    /// Delta-net layers, without experts.
    DeltaNet,
    /// Experts of the trunk.
    Moe,
    /// Last norm and vocabulary head.
    Head,
    /// The MTP head.
    Mtp,
    /// Commits of verify windows.
    Commit,
}

const PHASES: [Phase; 7] =
    [Phase::Embed, Phase::Attention, Phase::DeltaNet, Phase::Moe, Phase::Head, Phase::Mtp, Phase::Commit];

/// Times summed over all calls since the model was loaded or the counters were reset.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PerfCounters {
    /// Embedding rows and rope angles.
    pub embed: Duration,
    /// Attention layers of the trunk.
    pub attention: Duration,
    /// Delta-net layers.
    pub delta_net: Duration,
    /// Experts of the trunk.
    pub moe: Duration,
    /// Last norm and vocabulary head.
    pub head: Duration,
    /// The MTP head, its vocabulary head included.
    pub mtp: Duration,
    /// Commits of verify windows.
    pub commit: Duration,
}

/// Sums of nanoseconds per phase.
#[derive(Default)]
pub(super) struct PhaseClock {
    nanoseconds: [AtomicU64; PHASES.len()],
}

/// A running measurement.
pub(super) struct Lap<'a> {
    clock: &'a PhaseClock,
    since: Instant,
}

impl PhaseClock {
    pub(super) fn start(&self) -> Lap<'_> {
        Lap { clock: self, since: Instant::now() }
    }

    pub(super) fn read(&self) -> PerfCounters {
        let of = |phase: Phase| Duration::from_nanos(self.nanoseconds[phase as usize].load(Ordering::Relaxed));
        PerfCounters {
            embed: of(Phase::Embed),
            attention: of(Phase::Attention),
            delta_net: of(Phase::DeltaNet),
            moe: of(Phase::Moe),
            head: of(Phase::Head),
            mtp: of(Phase::Mtp),
            commit: of(Phase::Commit),
        }
    }

    pub(super) fn reset(&self) {
        self.nanoseconds.iter().for_each(|sum| sum.store(0, Ordering::Relaxed));
    }
}

impl Lap<'_> {
    /// Adds the time since the start or the last lap to a phase.
    pub(super) fn lap(&mut self, phase: Phase) {
        let now = Instant::now();
        let spent = now.duration_since(self.since).as_nanos() as u64;
        self.clock.nanoseconds[phase as usize].fetch_add(spent, Ordering::Relaxed);
        self.since = now;
    }
}
