//! Logging to stderr, one line per event with the name of its process, because a supervisor mixes the logs of
//! several. Text for people, JSON for collectors. A line that cannot be written is dropped, as on a full disk.
//! Not here: metrics and traces.

use std::{fmt, io};

use tracing::{Event, Subscriber};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::format::{Format, Full, Json, JsonFields, Writer};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

/// Environment variable with the filter, such as `debug` or `info,russet_gateway=trace`.
pub const FILTER_VARIABLE: &str = "RUSSET_LOG";

/// Info of Russet's own crates; of libraries only warnings or errors. kube's client logs each error that it
/// also returns, and its caller logs what the error means.
const DEFAULT_FILTER: &str =
    "info,h2=warn,hyper=warn,hyper_util=warn,rustls=warn,tower=warn,kube_runtime=warn,kube_client=off";

/// Starts logging for `process`, filtered by `RUSSET_LOG`. A second call in the same process (in tests, or
/// `russet up` in one process) changes nothing.
pub fn init(process: &str, json: bool) {
    let configured = std::env::var(FILTER_VARIABLE).ok().filter(|filter| !filter.trim().is_empty());
    let (filter, broken) = match configured {
        None => (EnvFilter::new(DEFAULT_FILTER), None),
        Some(text) => match EnvFilter::try_new(&text) {
            Ok(filter) => (filter, None),
            Err(error) => (EnvFilter::new(DEFAULT_FILTER), Some((text, error))),
        },
    };
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(|| UnlockedStderr)
        // Else a failed write is told with `eprintln!`, which panics in the task that logged.
        .log_internal_errors(false);
    // An error means that logging runs already, as this call wants.
    let started = if json {
        let format = Format::default().json().flatten_event(true);
        builder
            .fmt_fields(JsonFields::new())
            .event_format(NamedJson { process: process.to_owned(), format })
            .try_init()
    } else {
        builder
            .with_ansi(false)
            .event_format(NamedText { process: process.to_owned(), format: Format::default() })
            .try_init()
    };
    if let (Ok(()), Some((text, error))) = (started, broken) {
        tracing::warn!("{FILTER_VARIABLE}={text:?} is not a log filter ({error}); the level is info");
    }
}

/// Standard error without the lock of [`io::Stderr`]: threads that log at once do not wait until the line of another is
/// written, which made those of a busy gateway sleep. A line is one write, which a pipe keeps apart from others up to 4 KiB,
/// and a file whatever its length; longer lines of several threads may mix in a pipe.
struct UnlockedStderr;

impl io::Write for UnlockedStderr {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(rustix::io::write(io::stderr(), bytes)?)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// `gateway 2026-11-21T08:00:00Z INFO …`
struct NamedText {
    process: String,
    format: Format<Full>,
}

impl<S, N> FormatEvent<S, N> for NamedText
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        write!(writer, "{} ", self.process)?;
        self.format.format_event(context, writer, event)
    }
}

/// `{"process":"gateway","timestamp":…}`
struct NamedJson {
    process: String,
    format: Format<Json>,
}

impl<S, N> FormatEvent<S, N> for NamedJson
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let mut line = String::new();
        self.format.format_event(context, Writer::new(&mut line), event)?;
        match line.strip_prefix('{') {
            Some(rest) => {
                write!(writer, "{{\"process\":\"{}\",{rest}", self.process.escape_default())
            }
            None => writer.write_str(&line),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::sync::{Arc, Mutex};

    use super::*;

    #[derive(Clone, Default)]
    struct Buffer(Arc<Mutex<Vec<u8>>>);

    impl Write for Buffer {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    fn written(buffer: &Buffer) -> String {
        String::from_utf8(buffer.0.lock().unwrap().clone()).unwrap()
    }

    #[test]
    fn every_line_names_its_process_in_text_and_in_json() {
        let buffer = Buffer::default();
        let writer = buffer.clone();
        let text = tracing_subscriber::fmt()
            .with_writer(move || writer.clone())
            .with_ansi(false)
            .event_format(NamedText { process: "gateway".into(), format: Format::default() })
            .finish();
        tracing::subscriber::with_default(text, || tracing::info!(port = 1, "listening"));
        let line = written(&buffer);
        assert!(
            line.starts_with("gateway 2") && line.contains("listening port=1") && line.ends_with('\n'),
            "{line}"
        );

        let buffer = Buffer::default();
        let writer = buffer.clone();
        let json = tracing_subscriber::fmt()
            .with_writer(move || writer.clone())
            .fmt_fields(JsonFields::new())
            .event_format(NamedJson {
                process: "gateway".into(),
                format: Format::default().json().flatten_event(true),
            })
            .finish();
        tracing::subscriber::with_default(json, || tracing::info!(port = 1, "listening"));
        let line = written(&buffer);
        assert!(line.starts_with("{\"process\":\"gateway\",\"timestamp\":"), "{line}");
        assert!(line.contains("\"message\":\"listening\"") && line.trim_end().ends_with('}'), "{line}");
    }
}
