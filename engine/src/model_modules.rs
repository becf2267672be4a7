//! The modules of sentence-transformers in a model's folder: in files with flat names, as the model store keeps them, or
//! in folders, as their repository has them.

use std::io;
use std::path::{Path, PathBuf};

use russet_model::sentence_transformers::{
    MAX_MODULE_BYTES, MODULES, ModuleFiles, module_files, nested_path,
};

use crate::small_file;

/// The small files; none where the model has no list of modules. An error names the file.
pub fn read(dir: &Path) -> Result<ModuleFiles, (PathBuf, io::Error)> {
    let mut files = ModuleFiles::new();
    let Some(modules) = read_small(&dir.join(MODULES))? else { return Ok(files) };
    // A list that cannot be used is refused where the model is described.
    for name in module_files(&modules).unwrap_or_default() {
        if name.ends_with(".json")
            && let Some(bytes) = read_small(&module_path(dir, &name))?
        {
            files.insert(name, bytes);
        }
    }
    files.insert(MODULES.to_owned(), modules);
    Ok(files)
}

/// Where a file of a module is, by its flat name.
pub fn module_path(dir: &Path, name: &str) -> PathBuf {
    let flat = dir.join(name);
    match nested_path(name) {
        Some(nested) if !flat.exists() => dir.join(nested),
        _ => flat,
    }
}

/// A file of a module; `None` where there is none.
fn read_small(path: &Path) -> Result<Option<Vec<u8>>, (PathBuf, io::Error)> {
    let failed = |error| (path.to_owned(), error);
    let Some(bytes) = small_file::read(path, MAX_MODULE_BYTES).map_err(failed)? else { return Ok(None) };
    if bytes.len() as u64 > MAX_MODULE_BYTES {
        let problem = format!("it has more than {MAX_MODULE_BYTES} bytes, the limit of such a file");
        return Err(failed(io::Error::new(io::ErrorKind::FileTooLarge, problem)));
    }
    Ok(Some(bytes))
}
