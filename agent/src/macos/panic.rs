//! Kernel panic reports, `/Library/Logs/DiagnosticReports/panic-full-*.panic`: whether the GPU's memory was
//! the cause, as when MLX uses more memory than there is (ml-explore/mlx#3186), and which program was
//! running.

use super::{ParseError, text};

const REPORT: &str = "a panic report";

/// Contents of a report.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelPanic {
    /// Panic message, without the kernel's own addresses.
    pub message: String,
    /// Source file and line of the kernel, `IOGPUMemory.cpp:550`.
    pub location: String,
    /// The running program, if reported.
    pub task: Option<String>,
    /// Its process id, if reported.
    pub pid: Option<u32>,
    /// Build of macOS, if reported.
    pub build: Option<String>,
}

impl KernelPanic {
    /// Whether the GPU's memory was the cause.
    pub fn is_gpu_memory(&self) -> bool {
        self.location.starts_with("IOGPU") && self.location.contains("Memory.cpp")
    }

    /// Whether the watchdog fired after a minute and a half, as when the GPU waits for memory forever.
    pub fn is_watchdog(&self) -> bool {
        self.message.contains("watchdog timeout")
    }
}

/// Parses the first panic of a report; in newer reports, which are JSON, the text is a member.
pub fn panic(output: &[u8]) -> Result<KernelPanic, ParseError> {
    let text = text(output).replace("\\n", "\n").replace("\\\"", "\"");
    let missing = |what| ParseError::new(REPORT, format!("no {what}"));
    let (_, from) = text.split_once("panic(cpu ").ok_or_else(|| missing("line \"panic(cpu …)\""))?;
    let (_, from) = from.split_once("): ").ok_or_else(|| missing("message"))?;
    // The location may be on a line of its own.
    let (message, rest) = from.split_once('@').ok_or_else(|| missing("place in the kernel's source"))?;
    let place = rest.split(|letter: char| letter.is_whitespace() || letter == '"').next().unwrap_or_default();
    let after = |head: &str| {
        let mut lines = text.lines().filter_map(|line| line.split_once(head));
        lines.next().map(|(_, rest)| rest.trim())
    };
    let pid = after("Panicked task").and_then(|rest| {
        let (_, named) = rest.rsplit_once("pid ")?;
        named.split(|letter: char| !letter.is_ascii_digit()).next()?.parse().ok()
    });
    let task = after("Panicked task").map(|rest| {
        let named = rest.rsplit_once("pid ").map_or(rest, |(_, rest)| rest);
        let named = named.split_once(": ").map_or(named, |(_, name)| name);
        named.split(" — ").next().unwrap_or_default().trim_start_matches(':').trim().to_owned()
    });
    Ok(KernelPanic {
        message: message.trim().trim_matches('"').to_owned(),
        location: place.to_owned(),
        task: task.filter(|task| !task.is_empty()),
        pid,
        build: after("OS version:").map(str::to_owned),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_has_a_message_a_place_and_perhaps_a_program() {
        let report = "panic(cpu 7 caller 0xfffffe0044): \"prepare count underflow\" @IOGPUMemory.cpp:550\n\
            OS version: 25E246\nPanicked task 0xfffffe2: 1891705 pages, 85 threads: pid 49042: python3.13\n";
        let found = panic(report.as_bytes()).unwrap();
        assert_eq!(
            (found.message.as_str(), found.location.as_str()),
            ("prepare count underflow", "IOGPUMemory.cpp:550")
        );
        assert_eq!((found.task.as_deref(), found.build.as_deref()), (Some("python3.13"), Some("25E246")));
        assert!(found.is_gpu_memory() && !found.is_watchdog());
        assert_eq!(found.pid, Some(49042));
        let other = panic(b"panic(cpu 0): \"watchdog timeout\" @IOPlatformExpert.cpp:9").unwrap();
        assert!(!other.is_gpu_memory() && other.is_watchdog());
        assert_eq!((other.task, other.pid), (None, None));
    }

    #[test]
    fn a_report_in_json_is_read_by_the_text_in_it() {
        let report = br#"{"build":"x","panicString":"panic(cpu 1 caller 0x1): \"underflow\" @IOGPUMemory.cpp:550\nPanicked task 0x2: 7 pages: pid 3: russet-engine\n"}"#;
        let found = panic(report).unwrap();
        assert_eq!(
            (found.location.as_str(), found.task.as_deref()),
            ("IOGPUMemory.cpp:550", Some("russet-engine"))
        );
    }

    #[test]
    fn non_panic_report_is_refused() {
        assert!(panic(b"").is_err());
        assert!(panic(b"panic(cpu 0").is_err());
        assert!(panic(b"panic(cpu 0): \"no place\"").is_err());
    }
}
