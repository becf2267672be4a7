//! Model fingerprint: blocks of the prefix cache are valid for one model only.

use std::fmt::Write as _;
use std::path::Path;
use std::time::UNIX_EPOCH;

use sha2::{Digest as _, Sha256};

/// Fingerprint of a model's files: the checksums of the manifest that the agent leaves beside them, otherwise
/// their sizes and modification times. An empty fingerprint stands for no model.
pub fn model_fingerprint(dir: &Path) -> String {
    let mut words = String::new();
    if let Ok(manifest) = std::fs::read(dir.join("MANIFEST.json")) {
        words = hex::encode(Sha256::digest(manifest));
    } else {
        let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
        let mut files: Vec<_> = entries
            .filter_map(|entry| {
                let data = std::fs::metadata(entry.path()).ok()?;
                let since = data.modified().ok()?.duration_since(UNIX_EPOCH).ok()?;
                Some((entry.file_name(), data.len(), since.as_nanos()))
            })
            .collect();
        files.sort();
        for (name, bytes, time) in files {
            // Writing to a string does not fail.
            let _ = writeln!(words, "{} {bytes} {time}", name.display());
        }
    }
    hex::encode(&Sha256::digest(words)[..16])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_files_have_another_fingerprint() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("a"), "1").unwrap();
        let first = model_fingerprint(dir.path());
        assert_eq!(model_fingerprint(dir.path()), first);
        std::fs::write(dir.path().join("a"), "22").unwrap();
        assert_ne!(model_fingerprint(dir.path()), first);
        std::fs::write(dir.path().join("MANIFEST.json"), "{}").unwrap();
        let manifest = model_fingerprint(dir.path());
        std::fs::write(dir.path().join("a"), "333").unwrap();
        assert_eq!(model_fingerprint(dir.path()), manifest, "with a manifest nothing else counts");
    }
}
