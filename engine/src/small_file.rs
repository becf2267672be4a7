//! Small files of a model's folder, read whole and no further than any real one is long.

use std::fs::File;
use std::io::{self, Read as _};
use std::path::Path;

/// The bytes of a file; `None` where there is none. One byte beyond `limit` tells that it is longer.
pub fn read(path: &Path, limit: u64) -> io::Result<Option<Vec<u8>>> {
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    let mut bytes = Vec::new();
    file.take(limit + 1).read_to_end(&mut bytes)?;
    Ok(Some(bytes))
}
