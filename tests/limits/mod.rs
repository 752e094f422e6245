//! Runs the binary and measures what it took.

use std::io::Read;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// How a run of the binary ended and what it took.
pub struct Limited {
    /// The exit code; none when a signal ended it.
    pub code: Option<i32>,
    /// What it wrote to stderr.
    pub stderr: String,
    /// User and system time of all its threads: unlike the time on the wall, other processes hardly change it.
    cpu_time: Duration,
    elapsed: Duration,
    peak_bytes: u64,
}

/// Bad input is told within a second; a run that only reads a header takes milliseconds.
const MAX_CPU_TIME: Duration = Duration::from_secs(1);
/// Catches a run that waits instead of computing; the rest is room for a busy machine.
const MAX_ELAPSED: Duration = Duration::from_secs(10);
/// The program itself, with the bundled model in it, and the header of a small model. This process's own peak counts too.
const MAX_MEMORY: u64 = 300 << 20;

impl Limited {
    /// Runs `strata` with these arguments.
    // The child is waited for by wait4, which also tells what it used.
    #[allow(clippy::zombie_processes)]
    pub fn strata(args: &[&str]) -> Limited {
        let start = Instant::now();
        let mut child = Command::new(env!("CARGO_BIN_EXE_strata"))
            .args(args)
            .env_remove("STRATA_MODEL")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut stderr = Vec::new();
        child.stderr.take().unwrap().read_to_end(&mut stderr).unwrap();
        let mut status = 0;
        // SAFETY: all-zero bytes are a valid rusage, a plain C struct of integers.
        let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
        // SAFETY: the process is our child and has not been waited for; both pointers are to live values.
        let waited = unsafe { libc::wait4(child.id() as i32, &mut status, 0, &mut usage) };
        assert_eq!(waited, child.id() as i32);
        let time = |t: libc::timeval| Duration::new(t.tv_sec as u64, t.tv_usec as u32 * 1000);
        Limited {
            code: ExitStatus::from_raw(status).code(),
            stderr: String::from_utf8_lossy(&stderr).into_owned(),
            cpu_time: time(usage.ru_utime) + time(usage.ru_stime),
            elapsed: start.elapsed(),
            peak_bytes: usage.ru_maxrss as u64 * 1024,
        }
    }

    /// Fails when the run took more than reading a header may take.
    pub fn assert_small_and_quick(&self, what: &str) {
        assert!(self.cpu_time < MAX_CPU_TIME, "{what}: took {:?} of CPU time", self.cpu_time);
        assert!(self.elapsed < MAX_ELAPSED, "{what}: took {:?}", self.elapsed);
        assert!(self.peak_bytes < MAX_MEMORY, "{what}: took {} MiB", self.peak_bytes >> 20);
    }
}
