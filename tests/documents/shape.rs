//! The output of a command beside the output that a page shows: the same lines, whatever numbers they have.

/// Progress, of which a run shows what it happens to see.
const PROGRESS: &str = "waiting: ";

/// Compares shown with actual output; numbers, generated suffixes, addresses of servers, spaces and lines of progress may differ, and `…`
/// stands for whatever follows. Returns the first difference.
pub fn difference(shown: &str, actual: &str) -> Option<String> {
    let (shown, elided) = match shown.split_once('…') {
        Some((before, _)) => (before, true),
        None => (shown, false),
    };
    let (shown, actual) = (lines(shown), lines(actual));
    for (number, expected) in shown.iter().enumerate() {
        let last = number + 1 == shown.len();
        match actual.get(number) {
            Some(got) if got == expected || (elided && last && got.starts_with(expected.as_str())) => {}
            Some(got) => return Some(format!("the page shows {expected:?}, the command prints {got:?}")),
            None => return Some(format!("the page shows {expected:?}, the command prints no such line")),
        }
    }
    match actual.get(shown.len()) {
        Some(more) if !elided => Some(format!("the command also prints {more:?}")),
        _ => None,
    }
}

/// Lines of output without what differs from run to run.
fn lines(text: &str) -> Vec<String> {
    text.lines()
        .filter(|line| !line.starts_with(PROGRESS))
        .map(plain)
        .filter(|line| !line.is_empty())
        .collect()
}

/// A line with `#` for numbers and for the hash at the end of a generated name, `URL` for addresses of servers, and
/// single spaces.
fn plain(line: &str) -> String {
    let words = line.split_whitespace().map(|word| {
        if word.starts_with("http://") || word.starts_with("https://") {
            return "URL".to_owned();
        }
        if !word.starts_with(|first: char| first.is_alphabetic()) {
            return numbers(word);
        }
        let parts = word.split('-').map(|part| if is_hash(part) { "#" } else { part });
        parts.collect::<Vec<_>>().join("-")
    });
    words.collect::<Vec<_>>().join(" ")
}

/// Whether this part of a name is a hash: eight hexadecimal digits, perhaps before punctuation.
fn is_hash(part: &str) -> bool {
    let part = part.trim_end_matches([':', ',', '.']);
    part.len() == 8 && part.bytes().all(|byte| byte.is_ascii_hexdigit() && !byte.is_ascii_uppercase())
}

/// A number with its unit; digits in a name are part of the name.
fn numbers(part: &str) -> String {
    let mut plain = String::new();
    for letter in part.chars() {
        match letter.is_ascii_digit() {
            true if plain.ends_with('#') => {}
            true => plain.push('#'),
            false => plain.push(letter),
        }
    }
    plain
}
