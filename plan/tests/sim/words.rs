//! Tokens of a script line: plain words, quoted texts, and `key=value` fields. It knows no verb; an error is
//! one sentence, to which the parser adds file and line.

use russet_plan::quantity;

/// An error in a line.
pub type LineError = String;

/// The remaining words of a line.
#[derive(Clone, Debug)]
pub struct Words {
    rest: Vec<Word>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Word {
    Plain(String),
    Quoted(String),
}

impl Words {
    /// Splits a line; `#` begins a comment.
    pub fn of(line: &str) -> Result<Self, LineError> {
        let mut rest = Vec::new();
        let mut letters = line.chars().peekable();
        while let Some(letter) = letters.next() {
            match letter {
                '#' => break,
                '"' => {
                    let text: String = letters.by_ref().take_while(|letter| *letter != '"').collect();
                    if !line.contains(&format!("\"{text}\"")) {
                        return Err(format!("the text that begins with {text:?} has no closing quote"));
                    }
                    rest.push(Word::Quoted(text));
                }
                letter if letter.is_whitespace() => {}
                letter => {
                    let mut word = String::from(letter);
                    while let Some(next) = letters.next_if(|next| !next.is_whitespace()) {
                        word.push(next);
                    }
                    rest.push(Word::Plain(word));
                }
            }
        }
        rest.reverse();
        Ok(Self { rest })
    }

    /// Whether nothing is left.
    pub fn is_empty(&self) -> bool {
        self.rest.is_empty()
    }

    /// The next plain word, described by `what` in errors.
    pub fn plain(&mut self, what: &str) -> Result<String, LineError> {
        match self.rest.pop() {
            Some(Word::Plain(word)) => Ok(word),
            Some(Word::Quoted(text)) => Err(format!("{what} is expected where the text {text:?} stands")),
            None => Err(format!("{what} is expected at the end of the line")),
        }
    }

    /// The next text in quotes.
    pub fn text(&mut self, what: &str) -> Result<String, LineError> {
        match self.rest.pop() {
            Some(Word::Quoted(text)) => Ok(text),
            Some(Word::Plain(word)) => Err(format!("{what} in quotes is expected where {word:?} stands")),
            None => Err(format!("{what} in quotes is expected at the end of the line")),
        }
    }

    /// Removes the next word if it is this one.
    pub fn take(&mut self, word: &str) -> bool {
        let there = self.rest.last() == Some(&Word::Plain(word.to_owned()));
        if there {
            self.rest.pop();
        }
        there
    }

    /// The next word, one of these.
    pub fn one_of<T: Copy>(&mut self, choices: &[(&str, T)]) -> Result<T, LineError> {
        let names: Vec<&str> = choices.iter().map(|(name, _)| *name).collect();
        let word = self.plain(&names.join(", "))?;
        let found = choices.iter().find(|(name, _)| *name == word);
        found
            .map(|(_, choice)| *choice)
            .ok_or_else(|| format!("{} is expected where {word:?} stands", names.join(", ")))
    }

    /// All words before one of these, at least one.
    pub fn names(&mut self, what: &str, before: &[&str]) -> Result<Vec<String>, LineError> {
        let mut names = Vec::new();
        while let Some(Word::Plain(word)) = self.rest.last() {
            if before.contains(&word.as_str()) {
                break;
            }
            names.push(self.plain(what)?);
        }
        if names.is_empty() { Err(format!("{what} is expected")) } else { Ok(names) }
    }

    /// The remaining words as fields.
    pub fn fields(&mut self) -> Result<Fields, LineError> {
        let mut pairs: Vec<(String, String)> = Vec::new();
        while !self.is_empty() {
            let word = self.plain("key=value")?;
            let (key, value) =
                word.split_once('=').ok_or(format!("key=value is expected where {word:?} stands"))?;
            if pairs.iter().any(|(known, _)| known == key) {
                return Err(format!("{key}= stands there twice"));
            }
            pairs.push((key.to_owned(), value.to_owned()));
        }
        Ok(Fields { pairs })
    }

    /// Requires that nothing is left.
    pub fn end(self) -> Result<(), LineError> {
        match self.rest.last() {
            None => Ok(()),
            Some(Word::Plain(word) | Word::Quoted(word)) => {
                Err(format!("nothing is expected where {word:?} stands"))
            }
        }
    }
}

/// The remaining fields.
#[derive(Clone, Debug)]
pub struct Fields {
    pairs: Vec<(String, String)>,
}

impl Fields {
    /// The value of a key, if given.
    pub fn take(&mut self, key: &str) -> Option<String> {
        let at = self.pairs.iter().position(|(known, _)| known == key)?;
        Some(self.pairs.remove(at).1)
    }

    /// A number.
    pub fn number<N: std::str::FromStr>(&mut self, key: &str) -> Result<Option<N>, LineError> {
        self.take(key).map(|text| number(&text, key)).transpose()
    }

    /// Bytes, or bits per second.
    pub fn quantity(&mut self, key: &str) -> Result<Option<u64>, LineError> {
        self.take(key).map(|text| quantity(&text, key)).transpose()
    }

    /// Names separated by commas.
    pub fn list(&mut self, key: &str) -> Option<Vec<String>> {
        let text = self.take(key)?;
        Some(text.split(',').filter(|name| !name.is_empty()).map(str::to_owned).collect())
    }

    /// One of these words.
    pub fn one_of<T: Copy>(&mut self, key: &str, choices: &[(&str, T)]) -> Result<Option<T>, LineError> {
        let Some(word) = self.take(key) else { return Ok(None) };
        let names: Vec<&str> = choices.iter().map(|(name, _)| *name).collect();
        let found = choices.iter().find(|(name, _)| *name == word);
        let found = found.map(|(_, choice)| *choice);
        found.map(Some).ok_or_else(|| format!("{key}= is one of {}, not {word:?}", names.join(", ")))
    }

    /// All remaining fields.
    pub fn rest(self) -> Vec<(String, String)> {
        self.pairs
    }

    /// Requires that nothing is left.
    pub fn end(self, known: &str) -> Result<(), LineError> {
        match self.pairs.first() {
            None => Ok(()),
            Some((key, _)) => Err(format!("{key}= is no field of this line; there are {known}")),
        }
    }
}

/// A number.
pub fn number<N: std::str::FromStr>(text: &str, what: &str) -> Result<N, LineError> {
    text.parse().map_err(|_| format!("{what} is a number, not {text:?}"))
}

/// Bytes, or bits per second.
pub fn quantity(text: &str, what: &str) -> Result<u64, LineError> {
    quantity::parse(text).map_err(|wrong| format!("{what}: {wrong}"))
}
