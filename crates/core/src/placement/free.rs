//! How much memory the process may still take: the machine's available memory, or less where a control group limits it.

use std::fs;

/// Memory as the system reports it, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FreeMemory {
    /// Physical memory, or the control group's limit if that is lower.
    pub total: u64,
    /// What can be allocated without swapping. Pages of files can be dropped and count as available.
    pub available: u64,
}

/// Asks the system. `None` where it does not tell.
pub fn free_memory() -> Option<FreeMemory> {
    let machine = parse_meminfo(&fs::read_to_string("/proc/meminfo").ok()?)?;
    let read = |path: &str| fs::read_to_string(path).ok();
    let group = limit_of(
        read("/sys/fs/cgroup/memory.max"),
        read("/sys/fs/cgroup/memory.current"),
        read("/sys/fs/cgroup/memory.stat"),
    );
    Some(match group {
        Some(group) => {
            FreeMemory { total: machine.total.min(group.total), available: machine.available.min(group.available) }
        }
        None => machine,
    })
}

fn parse_meminfo(text: &str) -> Option<FreeMemory> {
    let field = |name: &str| {
        let line = text.lines().find(|line| line.starts_with(name))?;
        line.split_whitespace().nth(1)?.parse::<u64>().ok()?.checked_mul(1024)
    };
    Some(FreeMemory { total: field("MemTotal:")?, available: field("MemAvailable:")? })
}

fn limit_of(most: Option<String>, current: Option<String>, stat: Option<String>) -> Option<FreeMemory> {
    let total: u64 = most?.trim().parse().ok()?;
    let used: u64 = current?.trim().parse().ok()?;
    let stat = stat.unwrap_or_default();
    let files = |name: &str| {
        let line = stat.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.and_then(|value| value.trim().parse::<u64>().ok()).unwrap_or(0)
    };
    let droppable = files("inactive_file") + files("active_file");
    Some(FreeMemory { total, available: total.saturating_sub(used.saturating_sub(droppable)) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lower_of_machine_and_control_group_counts() {
        let machine = parse_meminfo("MemTotal:  1000 kB\nMemFree: 1 kB\nMemAvailable:  600 kB\n").unwrap();
        assert_eq!(machine, FreeMemory { total: 1_024_000, available: 614_400 });
        let text = |s: &str| Some(s.to_string());
        let group = limit_of(text("1000\n"), text("700\n"), text("anon 5\ninactive_file 200\nactive_file 100\n"));
        assert_eq!(group, Some(FreeMemory { total: 1000, available: 600 }));
        assert_eq!(limit_of(text("max\n"), text("700\n"), None), None);
        assert_eq!(parse_meminfo("nonsense"), None);
    }
}
