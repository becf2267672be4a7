//! The folders in which programs of this machine's user keep models: what the agent of `up` may read by itself. Authors of
//! Models may be other people, so it is not the whole disk.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// Folders below the home folder, where nothing else is said: models that people put there themselves, and LM Studio's
/// new and old place.
const IN_HOME: [&str; 3] = ["models", ".lmstudio/models", ".cache/lm-studio"];

/// The folders of the user with this home folder and environment, which may not exist.
pub fn of_owner(home: Option<&Path>, variable: impl Fn(&str) -> Option<OsString>) -> Vec<PathBuf> {
    let set = |name: &str| variable(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    // In the order in which huggingface_hub looks for its cache.
    let cache = || set("XDG_CACHE_HOME").or_else(|| Some(home?.join(".cache")));
    let hub = set("HF_HUB_CACHE")
        .or_else(|| Some(set("HF_HOME")?.join("hub")))
        .or_else(|| Some(cache()?.join("huggingface/hub")));
    let own = home.into_iter().flat_map(|home| IN_HOME.map(|folder| home.join(folder)));
    hub.into_iter().chain(own).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn model_folders_follow_home_and_hub_variables() {
        let folders = |home: Option<&str>, variables: &[(&str, &str)]| {
            let value =
                |name: &str| variables.iter().find(|(key, _)| *key == name).map(|(_, value)| value.into());
            let found = of_owner(home.map(Path::new), value);
            found.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(" ")
        };
        let own = "/home/me/models /home/me/.lmstudio/models /home/me/.cache/lm-studio";
        for (variables, hub) in [
            (&[][..], "/home/me/.cache/huggingface/hub"),
            (&[("HF_HOME", "")], "/home/me/.cache/huggingface/hub"),
            (&[("XDG_CACHE_HOME", "/c")], "/c/huggingface/hub"),
            (&[("HF_HOME", "/hf"), ("XDG_CACHE_HOME", "/c")], "/hf/hub"),
            (&[("HF_HUB_CACHE", "/cache"), ("HF_HOME", "/hf")], "/cache"),
        ] {
            assert_eq!(folders(Some("/home/me"), variables), format!("{hub} {own}"));
        }
        assert_eq!(folders(None, &[]), "");
        assert_eq!(folders(None, &[("HF_HOME", "/hf")]), "/hf/hub");
    }
}
