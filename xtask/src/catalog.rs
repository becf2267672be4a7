//! `cargo xtask catalog`: updates `cli/src/catalog/models.csv` from what the hub says about the repositories.
//! It neither adds nor removes rows, and leaves columns alone that a person decides.

use std::fmt;
use std::path::Path;
use std::process::Command;
use std::{env, fs};

use anyhow::{Context, Result, bail, ensure};
use csv::StringRecord;
use serde_json::Value;

use crate::{cargo, step};

const LIST: &str = "cli/src/catalog/models.csv";
/// Default if HF_ENDPOINT names no mirror.
const ENDPOINT: &str = "https://huggingface.co";
/// Connect timeout in seconds: without a network, each row takes this long.
const CONNECT_TIMEOUT_SECONDS: &str = "10";
/// Response timeout in seconds. A listing has some hundred bytes per file, so even a slow connection is done
/// long before.
const REQUEST_TIMEOUT_SECONDS: &str = "60";
/// Maximum characters of external text in a column or a reason; the longest licence so far has 22.
const MAX_WORD_CHARS: usize = 60;
/// The first line of the list.
const COLUMNS: [&str; 12] = [
    "name",
    "repo",
    "family",
    "architecture",
    "parameters",
    "active",
    "bits",
    "format",
    "bytes",
    "from",
    "context",
    "licence",
];

// Indices of columns in a row.
const NAME: usize = 0;
const REPOSITORY: usize = 1;
const ARCHITECTURE: usize = 3;
const BITS: usize = 6;
const FORMAT: usize = 7;
const BYTES: usize = 8;
const ORIGIN: usize = 9;
const CONTEXT: usize = 10;
const LICENCE: usize = 11;

/// A row of the list, as text, so that an unchanged row stays byte for byte the same.
#[derive(Clone, Debug, PartialEq)]
struct CatalogRow([String; COLUMNS.len()]);

/// The hub's data on a repository.
struct HubAnswer {
    /// The API's response: files, commit, card.
    listing: Value,
    /// The model's `config.json` of that commit.
    config: Value,
}

/// Why a row was not updated.
enum UnchangedReason {
    /// The hub responded, and its values do not fit the catalogue.
    Unfit(String),
    Unreachable(String),
}

/// Number of rows by outcome.
#[derive(Default)]
struct Tally {
    rows: usize,
    changed: usize,
    unfit: usize,
    unreachable: usize,
}

/// Queries every row and writes the list, or only compares.
pub fn run(arguments: &[String]) -> Result<()> {
    let check = match arguments {
        [] => false,
        [argument] if argument == "--check" => true,
        _ => bail!("`{}` is not understood; catalog takes --check or nothing", arguments.join(" ")),
    };
    step::run(
        Command::new("curl").arg("--version"),
        "run curl, which asks the hub (on Debian: apt-get install curl)",
    )?;
    let endpoint = env::var("HF_ENDPOINT").ok().filter(|endpoint| !endpoint.is_empty());
    update(&cargo::root().join(LIST), endpoint.as_deref().unwrap_or(ENDPOINT), check)
}

/// Updates `list` from the hub. A check judges the list only: a repository that cannot be reached changes
/// nothing in it, and so fails only a run that writes.
fn update(list: &Path, endpoint: &str, check: bool) -> Result<()> {
    let shown = list.display();
    let text = fs::read_to_string(list).with_context(|| format!("cannot read {shown}"))?;
    let mut rows = read(&text).with_context(|| shown.to_string())?;
    let mut tally = Tally { rows: rows.len(), ..Tally::default() };
    for row in &mut rows {
        let said = ask(endpoint, &row.0[REPOSITORY]).map_err(UnchangedReason::Unreachable);
        let (reason, count) = match said.and_then(|said| merged(row, &said).map_err(UnchangedReason::Unfit)) {
            Ok(new) if new == *row => continue,
            Ok(new) => {
                println!("{}: {}", row.0[NAME], differences(row, &new));
                tally.changed += 1;
                *row = new;
                continue;
            }
            Err(UnchangedReason::Unfit(reason)) => (reason, &mut tally.unfit),
            Err(UnchangedReason::Unreachable(reason)) => (reason, &mut tally.unreachable),
        };
        println!("{}: stays as it was: {reason}", row.0[NAME]);
        *count += 1;
    }
    println!("{tally}");
    ensure!(
        tally.unreachable < tally.rows,
        "none of the {} rows could be asked of {endpoint}, so {shown} stays as it is; name a hub or a mirror that this \
         machine reaches in HF_ENDPOINT",
        tally.rows
    );
    rows.sort_by(|one, other| one.0[NAME].cmp(&other.0[NAME]));
    let new = write(&rows)?;
    if check {
        ensure!(new == text, "{shown} is not what {endpoint} says; run `cargo xtask catalog` and commit");
        return Ok(());
    }
    if new != text {
        replace(list, &new)?;
    }
    let left = tally.unfit + tally.unreachable;
    ensure!(
        left == 0,
        "{left} of {} rows of {shown} stay as they were, for the reasons above; correct `repo`, or run this again",
        tally.rows
    );
    Ok(())
}

/// The row with all values that the repository states, or why they do not fit. Others stay.
fn merged(row: &CatalogRow, said: &HubAnswer) -> Result<CatalogRow, String> {
    let HubAnswer { listing, config } = said;
    let mut new = row.clone();
    let (bits, format) = packing(config)?;
    new.0[BITS] = bits.to_string();
    new.0[FORMAT] = format.to_owned();
    if let Some(architecture) = config["model_type"].as_str() {
        new.0[ARCHITECTURE] = column("model_type", architecture)?;
    }
    if let Some(bytes) = weights(listing)? {
        new.0[BYTES] = bytes.to_string();
        new.0[ORIGIN] = "listed".to_owned();
    }
    if let Some(context) = context(config) {
        new.0[CONTEXT] = context.to_string();
    }
    if let Some(licence) = licence(listing).filter(|licence| letters(licence) != letters(&row.0[LICENCE])) {
        new.0[LICENCE] = column("license", licence)?;
    }
    Ok(new)
}

/// Bits and format of most weights; single modules may be quantized otherwise.
fn packing(config: &Value) -> Result<(u64, &'static str), String> {
    let quantization = match &config["quantization"] {
        Value::Null => &config["quantization_config"],
        own => own,
    };
    if quantization.is_null() {
        return Err(
            "its config.json has no quantization, and the catalogue has packed models only".to_owned()
        );
    }
    if let Some(method) = quantization["quant_method"].as_str() {
        return Err(format!("its weights are packed by {}, not by MLX", printable(method)));
    }
    let (mode, group, bits) = (&quantization["mode"], &quantization["group_size"], &quantization["bits"]);
    match (mode.as_str(), group.as_u64(), bits.as_u64()) {
        (Some("affine"), Some(64), Some(bits)) => Ok((bits, "affine")),
        (Some("affine"), Some(32), Some(bits)) => Ok((bits, "affine32")),
        // Other modes came later than affine, which older configurations do not name.
        (None, Some(64), Some(bits)) if mode.is_null() => Ok((bits, "affine")),
        (None, Some(32), Some(bits)) if mode.is_null() => Ok((bits, "affine32")),
        (Some("mxfp4"), _, Some(bits)) => Ok((bits, "mxfp4")),
        _ => Err(format!(
            "its quantization has mode {}, group_size {} and bits {}; the catalogue has affine in groups of 64 or 32, \
             and mxfp4",
            printable(&mode.to_string()),
            printable(&group.to_string()),
            printable(&bits.to_string()),
        )),
    }
}

/// Bytes of the weights: of the files in the repository's top folder, as agents fetch no others.
fn weights(listing: &Value) -> Result<Option<u64>, String> {
    let Some(files) = listing["siblings"].as_array() else { return Ok(None) };
    let is_weights = |name: &str| name.ends_with(".safetensors") && !name.contains('/');
    let files = files.iter().filter(|file| file["rfilename"].as_str().is_some_and(is_weights));
    // Mirrors may list files without their sizes, and a partial sum is useless.
    let sizes: Option<Vec<u64>> = files.map(|file| file["size"].as_u64()).collect();
    if sizes.as_ref().is_some_and(Vec::is_empty) {
        return Err("it has no *.safetensors in its own folder".to_owned());
    }
    Ok(sizes.and_then(|sizes| sizes.into_iter().try_fold(0, u64::checked_add)))
}

/// The maximum context length. Multimodal models state it in the text part.
fn context(config: &Value) -> Option<u64> {
    let said = |config: &Value| config["max_position_embeddings"].as_u64();
    said(config).or_else(|| said(&config["text_config"]))
}

/// The licence, by its name if the hub has no short form for it.
fn licence(listing: &Value) -> Option<&str> {
    let card = &listing["cardData"];
    let tag = || {
        let tags = listing["tags"].as_array()?;
        tags.iter().filter_map(Value::as_str).find_map(|tag| tag.strip_prefix("license:"))
    };
    match card["license"].as_str().or_else(tag)? {
        "other" => card["license_name"].as_str(),
        "unknown" => None,
        licence => Some(licence),
    }
}

/// The letters of a licence, to compare two spellings.
fn letters(licence: &str) -> String {
    licence.chars().filter(char::is_ascii_alphanumeric).collect::<String>().to_ascii_lowercase()
}

/// External text as a column. Commas and quotes are refused, so that a row is one line without quoting, which
/// people read and `git diff` shows.
fn column(what: &str, word: &str) -> Result<String, String> {
    let plain = |letter: char| letter.is_ascii_graphic() && !matches!(letter, ',' | '"') || letter == ' ';
    if word.trim().is_empty() || word.len() > MAX_WORD_CHARS || !word.chars().all(plain) {
        return Err(format!("its {what} is \"{}\", which no column can hold", printable(word)));
    }
    Ok(word.trim().to_owned())
}

/// External text for a terminal.
fn printable(text: &str) -> String {
    text.chars().filter(|letter| letter.is_ascii_graphic() || *letter == ' ').take(MAX_WORD_CHARS).collect()
}

fn differences(old: &CatalogRow, new: &CatalogRow) -> String {
    let pairs = COLUMNS.iter().zip(old.0.iter().zip(&new.0));
    let differing = pairs.filter(|(_, (old, new))| old != new);
    differing.map(|(column, (old, new))| format!("{column} {old} -> {new}")).collect::<Vec<_>>().join(", ")
}

impl CatalogRow {
    fn read(record: &StringRecord) -> Result<Self> {
        let columns: Vec<String> = record.iter().map(str::to_owned).collect();
        let found = columns.len();
        let columns = columns.try_into().ok();
        Ok(Self(columns.with_context(|| format!("there are {found} columns, not {}", COLUMNS.len()))?))
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, formatter: &mut fmt::Formatter) -> fmt::Result {
        let Self { rows, changed, unfit, unreachable: unasked } = self;
        let same = rows - changed - unfit - unasked;
        write!(
            formatter,
            "{rows} rows: {changed} changed, {same} as they were, {unasked} could not be asked"
        )?;
        match unfit {
            0 => Ok(()),
            unfit => write!(formatter, ", {unfit} not for the catalogue"),
        }
    }
}

fn read(text: &str) -> Result<Vec<CatalogRow>> {
    // A row with other columns is reported with all of them.
    let mut reader = csv::ReaderBuilder::new().flexible(true).from_reader(text.as_bytes());
    let first = reader.headers()?.iter().collect::<Vec<_>>().join(",");
    ensure!(first == COLUMNS.join(","), "line 1 must be `{}`, not `{first}`", COLUMNS.join(","));
    let row = |(index, record): (usize, csv::Result<StringRecord>)| {
        let record = record.with_context(|| format!("line {}", index + 2))?;
        let shown = || format!("line {}: {}", index + 2, record.iter().collect::<Vec<_>>().join(","));
        CatalogRow::read(&record).with_context(shown)
    };
    reader.records().enumerate().map(row).collect()
}

fn write(rows: &[CatalogRow]) -> Result<String> {
    let mut writer = csv::Writer::from_writer(Vec::new());
    writer.write_record(COLUMNS)?;
    for row in rows {
        writer.write_record(&row.0)?;
    }
    Ok(String::from_utf8(writer.into_inner()?)?)
}

/// Replaces the list with `text` by one rename, so that a killed run leaves the old list.
fn replace(list: &Path, text: &str) -> Result<()> {
    let aside = list.with_extension(format!("csv.{}", std::process::id()));
    let replaced = fs::write(&aside, text).and_then(|()| fs::rename(&aside, list));
    if replaced.is_err() {
        // It may not even exist; the first error is the relevant one.
        let _ = fs::remove_file(&aside);
    }
    replaced.with_context(|| format!("cannot write {} and rename it to {}", aside.display(), list.display()))
}

fn ask(endpoint: &str, repository: &str) -> Result<HubAnswer, String> {
    let endpoint = endpoint.trim_end_matches('/');
    let of = |missing: &str| format!("{repository} {missing}");
    let listing =
        get(&format!("{endpoint}/api/models/{repository}?blobs=true"), &of("is gone or was never there"))?;
    let is_commit = |sha: &&str| !sha.is_empty() && sha.bytes().all(|byte| byte.is_ascii_hexdigit());
    let Some(sha) = listing["sha"].as_str().filter(is_commit) else {
        return Err(format!("{endpoint} names no commit of {repository}: it is no hub"));
    };
    let config =
        get(&format!("{endpoint}/{repository}/resolve/{sha}/config.json"), &of("has no config.json"))?;
    Ok(HubAnswer { listing, config })
}

/// The JSON at a URL; `missing` is the error if there is none.
fn get(url: &str, missing: &str) -> Result<Value, String> {
    // A mirror must not redirect to local files, nor curl expand brackets.
    let output = Command::new("curl")
        // Without the user's own settings; curl requires this option first.
        .args(["--disable", "--silent", "--show-error", "--location", "--globoff", "--proto", "=http,https"])
        .args([
            "--connect-timeout",
            CONNECT_TIMEOUT_SECONDS,
            "--max-time",
            REQUEST_TIMEOUT_SECONDS,
            "--write-out",
            "\n%{http_code}",
        ])
        .args(["--url", url])
        .output()
        .map_err(|error| format!("cannot run curl: {error}"))?;
    if !output.status.success() {
        return Err(format!("{url}: {}", String::from_utf8_lossy(&output.stderr).trim()));
    }
    let text = String::from_utf8_lossy(&output.stdout);
    let (body, status) = text.rsplit_once('\n').unwrap_or_default();
    match status {
        "200" => serde_json::from_str(body).map_err(|error| format!("{url} is not JSON: {error}")),
        "404" => Err(format!("{missing} (404)")),
        // The hub returns this also for missing repositories, to clients without an account.
        "401" | "403" => Err(format!("{missing}, or is not open to everybody ({status})")),
        status => Err(format!("{url} answers {status}")),
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader, Write};
    use std::net::{SocketAddr, TcpListener, TcpStream};
    use std::path::PathBuf;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::thread::JoinHandle;

    use super::*;

    const SHA: &str = "0123456789abcdef0123456789abcdef01234567";

    fn row(line: &str) -> CatalogRow {
        CatalogRow::read(&line.split(',').collect()).unwrap()
    }

    /// A repository as the hub describes it: two files of weights, 600 bytes together.
    fn listing(card: &str) -> String {
        format!(
            r#"{{"sha": "{SHA}", {card}, "siblings": [
                {{"rfilename": "model-00001-of-00002.safetensors", "size": 500}},
                {{"rfilename": "model-00002-of-00002.safetensors", "size": 100}},
                {{"rfilename": "adapters/old.safetensors", "size": 7000}},
                {{"rfilename": "tokenizer.json", "size": 9000}}]}}"#
        )
    }

    #[test]
    fn catalog_row_takes_listed_values_and_keeps_the_rest() {
        let row = row("a,o/a,A,guessed,1.0,0.5,8,affine,77,computed,99,Apache-2.0");
        let apache = listing(r#""cardData": {"license": "apache-2.0"}"#);
        let packed =
            |rest: &str| format!(r#"{{"model_type": "llama", "max_position_embeddings": 2048, {rest}}}"#);
        let four = packed(r#""quantization": {"group_size": 64, "bits": 4}"#);
        for (listing, config, expected) in [
            (apache.clone(), four.clone(), Ok("llama,1.0,0.5,4,affine,600,listed,2048,Apache-2.0")),
            // Quantization.
            (
                apache.clone(),
                packed(r#""quantization": {"group_size": 32, "bits": 4, "mode": "affine"}"#),
                Ok("llama,1.0,0.5,4,affine32,600,listed,2048,Apache-2.0"),
            ),
            (
                apache.clone(),
                packed(r#""quantization": {"group_size": 32, "bits": 4, "mode": "mxfp4", "lm_head": {"bits": 8}}"#),
                Ok("llama,1.0,0.5,4,mxfp4,600,listed,2048,Apache-2.0"),
            ),
            (
                apache.clone(),
                packed(r#""quantization_config": {"group_size": 64, "bits": 6, "mode": "affine"}"#),
                Ok("llama,1.0,0.5,6,affine,600,listed,2048,Apache-2.0"),
            ),
            (apache.clone(), packed(r#""torch_dtype": "bfloat16""#), Err("has no quantization")),
            (
                apache.clone(),
                packed(r#""quantization": {"group_size": 128, "bits": 4}"#),
                Err("mode null, group_size 128 and bits 4"),
            ),
            (
                apache.clone(),
                packed(r#""quantization": {"group_size": 16, "bits": 4, "mode": "nvfp4\u001b[2J"}"#),
                Err("mode \"nvfp4\\u001b[2J\", group_size 16"),
            ),
            (
                apache.clone(),
                packed(r#""quantization_config": {"group_size": 64, "bits": 4, "quant_method": "gptq"}"#),
                Err("packed by gptq"),
            ),
            (apache.clone(), packed(r#""quantization": {"group_size": 64}"#), Err("bits null")),
            // The value is below, elsewhere or missing.
            (
                apache.clone(),
                r#"{"model_type": "gemma3", "text_config": {"max_position_embeddings": 4096, "model_type": "gemma3_text"},
                    "quantization": {"group_size": 64, "bits": 4}}"#
                    .to_owned(),
                Ok("gemma3,1.0,0.5,4,affine,600,listed,4096,Apache-2.0"),
            ),
            (
                apache.clone(),
                r#"{"quantization": {"group_size": 64, "bits": 4}}"#.to_owned(),
                Ok("guessed,1.0,0.5,4,affine,600,listed,99,Apache-2.0"),
            ),
            (
                apache.clone().replace(r#", "size": 100"#, ""),
                four.clone(),
                Ok("llama,1.0,0.5,4,affine,77,computed,2048,Apache-2.0"),
            ),
            (
                apache.clone().replace("100", "18446744073709551615"),
                four.clone(),
                Ok("llama,1.0,0.5,4,affine,77,computed,2048,Apache-2.0"),
            ),
            (
                apache.clone().replace("model-", "old/model-"),
                four.clone(),
                Err("no *.safetensors in its own folder"),
            ),
            (apache.clone(), four.replace("llama", "a,b"), Err("its model_type is \"a,b\"")),
            // Licences.
            (
                listing(r#""tags": ["mlx", "license:llama3.1"]"#),
                four.clone(),
                Ok("llama,1.0,0.5,4,affine,600,listed,2048,llama3.1"),
            ),
            (
                listing(r#""cardData": {"license": "other", "license_name": "lfm1.0"}, "tags": ["license:other"]"#),
                four.clone(),
                Ok("llama,1.0,0.5,4,affine,600,listed,2048,lfm1.0"),
            ),
            (
                listing(r#""tags": ["license:other"]"#),
                four.clone(),
                Ok("llama,1.0,0.5,4,affine,600,listed,2048,Apache-2.0"),
            ),
            (
                listing(r#""cardData": {"license": "\u001b[2J"}"#),
                four.clone(),
                Err("its license is \"[2J\""),
            ),
        ] {
            let said = HubAnswer {
                listing: serde_json::from_str(&listing).unwrap(),
                config: serde_json::from_str(&config).unwrap(),
            };
            match (merged(&row, &said), expected) {
                (Ok(new), Ok(columns)) => {
                    assert_eq!(new.0.join(","), format!("a,o/a,A,{columns}"), "{config} {listing}");
                }
                (Err(reason), Err(part)) => assert!(reason.contains(part), "{reason}, not {part}"),
                (filled, _) => panic!("{filled:?}, not {expected:?}: {config} {listing}"),
            }
        }
    }

    #[test]
    fn the_list_of_this_release_is_written_as_it_is_read() {
        let text = fs::read_to_string(cargo::root().join(LIST)).unwrap();
        let rows = read(&text).unwrap();
        assert!(rows.is_sorted_by(|one, other| one.0[NAME] < other.0[NAME]));
        assert_eq!(write(&rows).unwrap(), text);
    }

    #[test]
    fn malformed_list_is_reported_with_its_line() {
        let first = COLUMNS.join(",");
        for (text, expected) in [
            (String::new(), "line 1 must be `name,repo,"),
            ("name,repo\n".to_owned(), "not `name,repo`"),
            (format!("{first}\na,o/a\n"), "line 2: a,o/a: there are 2 columns, not 12"),
        ] {
            let error = format!("{:#}", read(&text).unwrap_err());
            assert!(error.contains(expected), "{error}");
        }
    }

    /// Response for one path: a status and a body, or a connection that ends without either.
    type StubAnswer = (String, Option<(u16, String)>);

    /// A hub on this machine; other paths are not found. It ends with its test.
    struct StubHub {
        address: SocketAddr,
        ended: Arc<AtomicBool>,
        thread: Option<JoinHandle<()>>,
    }

    impl StubHub {
        fn start(answers: Vec<StubAnswer>) -> Self {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let address = listener.local_addr().unwrap();
            let ended = Arc::new(AtomicBool::new(false));
            let ends = ended.clone();
            let thread = std::thread::spawn(move || {
                for stream in listener.incoming().take_while(|_| !ends.load(Ordering::SeqCst)) {
                    // A client may have disconnected, which does not affect the next one.
                    let _ = stream.and_then(|stream| answer(stream, &answers));
                }
            });
            Self { address, ended, thread: Some(thread) }
        }

        fn endpoint(&self) -> String {
            format!("http://{}", self.address)
        }
    }

    impl Drop for StubHub {
        fn drop(&mut self) {
            self.ended.store(true, Ordering::SeqCst);
            // The thread waits for a connection, and this is its last.
            let _ = TcpStream::connect(self.address);
            if let Some(thread) = self.thread.take() {
                thread.join().unwrap();
            }
        }
    }

    fn answer(mut stream: TcpStream, answers: &[StubAnswer]) -> std::io::Result<()> {
        let mut lines = BufReader::new(stream.try_clone()?).lines();
        let request = lines.next().transpose()?.unwrap_or_default();
        for line in lines {
            if line?.is_empty() {
                break;
            }
        }
        let path = request.split(' ').nth(1).unwrap_or_default();
        let (status, body) = match answers.iter().find(|(known, _)| known == path) {
            Some((_, Some((status, body)))) => (*status, body.as_str()),
            Some((_, None)) => return Ok(()),
            None => (404, "{}"),
        };
        write!(
            stream,
            "HTTP/1.1 {status} x\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}",
            body.len()
        )
    }

    fn described(repository: &str, licence: &str, config: &str) -> Vec<StubAnswer> {
        let listing = listing(&format!(r#""cardData": {{"license": "{licence}"}}"#));
        vec![
            (format!("/api/models/{repository}?blobs=true"), Some((200, listing))),
            (format!("/{repository}/resolve/{SHA}/config.json"), Some((200, config.to_owned()))),
        ]
    }

    /// A folder of one test, deleted on drop.
    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Self {
            let path = env::temp_dir().join(format!("russet-xtask-{name}-{}", std::process::id()));
            fs::create_dir_all(&path).unwrap();
            Self(path)
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            fs::remove_dir_all(&self.0).unwrap();
        }
    }

    #[test]
    fn list_follows_the_hub_and_is_stable_on_a_second_run() {
        let config = r#"{"model_type": "llama", "max_position_embeddings": 2048, "quantization": {"group_size": 64, "bits": 4}}"#;
        let mut answers = described("o/a", "mit", config);
        answers.extend(described("o/b", "apache-2.0", &config.replace("64", "32")));
        let hub = StubHub::start(answers);
        let folder = Folder::new("catalog");
        let list = folder.0.join("models.csv");
        let first = COLUMNS.join(",");
        let gone = "c-4bit,o/c,C,phi3,3.8,3.8,4,affine,2137500000,computed,4096,MIT";
        let old = format!(
            "{first}\n{gone}\nb-4bit,o/b,B,mistral,2,1.0,8,affine,1,computed,1,MIT\na-4bit,o/a,A,llama,1,1,4,affine,600,listed,2048,MIT\n"
        );
        fs::write(&list, &old).unwrap();

        let run = |check| update(&list, &hub.endpoint(), check).map_err(|error| format!("{error:#}"));
        let error = run(true).unwrap_err();
        assert!(error.contains("run `cargo xtask catalog` and commit"), "{error}");
        assert_eq!(fs::read_to_string(&list).unwrap(), old, "a check writes nothing");

        let new = format!(
            "{first}\na-4bit,o/a,A,llama,1,1,4,affine,600,listed,2048,MIT\nb-4bit,o/b,B,llama,2,1.0,4,affine32,600,listed,2048,apache-2.0\n{gone}\n"
        );
        for _ in 0..2 {
            let error = run(false).unwrap_err();
            assert!(error.starts_with("1 of 3 rows of "), "{error}");
            assert_eq!(fs::read_to_string(&list).unwrap(), new);
        }
        assert_eq!(run(true), Ok(()), "one row that cannot be asked is no change");
        assert_eq!(fs::read_dir(&folder.0).unwrap().count(), 1, "nothing is left beside the list");

        let known = new.replace(&format!("{gone}\n"), "");
        fs::write(&list, &known).unwrap();
        assert_eq!(run(false), Ok(()));
        assert_eq!(fs::read_to_string(&list).unwrap(), known);
    }

    #[test]
    fn unreachable_hub_writes_nothing_and_names_the_remedy() {
        let hub = StubHub::start(Vec::new());
        let folder = Folder::new("catalog-alone");
        let list = folder.0.join("models.csv");
        let old = format!("{}\nb,o/b,B,x,1,1,4,affine,1,computed,1,MIT\n", COLUMNS.join(","));
        fs::write(&list, &old).unwrap();
        for check in [true, false] {
            let error = format!("{:#}", update(&list, &hub.endpoint(), check).unwrap_err());
            assert!(error.contains(&hub.endpoint()) && error.contains("HF_ENDPOINT"), "{error}");
            assert_eq!(fs::read_to_string(&list).unwrap(), old);
        }
    }

    #[test]
    fn unreachable_repository_is_reported_with_the_reason() {
        let api = |name: &str, answer| (format!("/api/models/o/{name}?blobs=true"), answer);
        let mut answers = vec![
            api("silent", None),
            api("closed", Some((401, "{}".to_owned()))),
            api("busy", Some((429, "{}".to_owned()))),
            api("portal", Some((200, "<html>".to_owned()))),
            api("other", Some((200, r#"{"sha": "../main"}"#.to_owned()))),
            api("bare", Some((200, format!(r#"{{"sha": "{SHA}"}}"#)))),
        ];
        answers.extend(described("o/whole", "mit", "{}"));
        let hub = StubHub::start(answers);
        for (name, expected) in [
            ("silent", "?blobs=true: curl: (52)"),
            ("missing", "o/missing is gone or was never there (404)"),
            ("closed", "o/closed is gone or was never there, or is not open to everybody (401)"),
            ("busy", "answers 429"),
            ("portal", "is not JSON"),
            ("other", "names no commit of o/other"),
            ("bare", "o/bare has no config.json (404)"),
        ] {
            let reason = ask(&hub.endpoint(), &format!("o/{name}")).err().unwrap_or_default();
            assert!(reason.contains(expected), "{reason}, not {expected}");
        }
        assert!(ask(&format!("{}/", hub.endpoint()), "o/whole").is_ok(), "a slash at the end is none more");
    }

    #[test]
    fn catalog_update_is_summarised_in_one_line() {
        let tally = Tally { rows: 126, changed: 3, unfit: 0, unreachable: 3 };
        assert_eq!(tally.to_string(), "126 rows: 3 changed, 120 as they were, 3 could not be asked");
        let tally = Tally { unfit: 1, ..tally };
        assert!(
            tally.to_string().ends_with("119 as they were, 3 could not be asked, 1 not for the catalogue")
        );
        let old = row("a,o/a,A,llama,1,1,4,affine,5,computed,8,MIT");
        let mut new = old.clone();
        new.0[BYTES] = "6".to_owned();
        new.0[ORIGIN] = "listed".to_owned();
        assert_eq!(differences(&old, &new), "bytes 5 -> 6, from computed -> listed");
    }
}
