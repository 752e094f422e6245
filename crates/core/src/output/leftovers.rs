//! Temporary names, and the files under such names that killed processes left behind.

use std::ffi::{OsStr, OsString};
use std::fs::{File, TryLockError};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

const END: &[u8] = b".partial";
/// Of longer names only the start is used: file systems allow 255 bytes, and the rest of the temporary name needs some.
const LONGEST_NAME: usize = 200;

fn start_of(name: &OsStr) -> Vec<u8> {
    let name = name.as_bytes();
    [b".", &name[..name.len().min(LONGEST_NAME)], b"."].concat()
}

/// A name for an unfinished file that will be called `name`: `.NAME.PROCESS.COUNT.partial`.
pub(super) fn temporary_name(name: &OsStr) -> OsString {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let mut bytes = start_of(name);
    bytes.extend(format!("{}.{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed)).into_bytes());
    bytes.extend(END);
    OsString::from_vec(bytes)
}

/// The process that made a temporary name for `name`, or for any name.
fn process_of(temporary: &OsStr, name: Option<&OsStr>) -> Option<i32> {
    let rest = temporary.as_bytes().strip_suffix(END)?.strip_prefix(b".")?;
    let rest = match name {
        Some(name) => rest.strip_prefix(&start_of(name)[1..])?,
        None => {
            // The last two fields are the process and its count.
            let fields = rest.rsplitn(3, |b| *b == b'.').map(<[u8]>::len).take(2).sum::<usize>() + 1;
            &rest[rest.len().checked_sub(fields)?..]
        }
    };
    let (process, count) = std::str::from_utf8(rest).ok()?.split_once('.')?;
    count.parse::<u64>().ok()?;
    process.parse().ok().filter(|process| *process > 0)
}

/// Removes unfinished files in `folder` whose process has ended: those meant to become `name`, or all of them.
///
/// A file is kept when its process lives, or when somebody holds its lock (a process of another container or machine,
/// whose number means nothing here).
pub fn remove_leftovers(folder: &Path, name: Option<&OsStr>) {
    let Ok(entries) = std::fs::read_dir(folder) else { return };
    for entry in entries.flatten() {
        let Some(process) = process_of(&entry.file_name(), name) else { continue };
        let at_work = match process.unsigned_abs() == std::process::id() {
            true => super::file::is_unfinished(&entry.file_name()),
            false => is_alive(process),
        };
        if at_work {
            continue;
        }
        let locked = match File::open(entry.path()) {
            Ok(file) => matches!(file.try_lock(), Err(TryLockError::WouldBlock)),
            Err(_) => false,
        };
        if !locked {
            // One that cannot be removed is in nobody's way.
            let _ = std::fs::remove_file(entry.path());
        }
    }
}

fn is_alive(process: i32) -> bool {
    // SAFETY: signal 0 sends nothing; it only asks whether the process exists.
    let found = unsafe { libc::kill(process, 0) } == 0;
    found || std::io::Error::last_os_error().raw_os_error() != Some(libc::ESRCH)
}
