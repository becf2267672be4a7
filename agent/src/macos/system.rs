//! `sysctl NAME…` and `sw_vers`: sizes, limits and versions.

use super::{ParseError, fields, text};

const SYSCTL: &str = "sysctl";
const VERSIONS: &str = "sw_vers";

/// Output of `sysctl`, by name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sysctls(Vec<(String, String)>);

impl Sysctls {
    /// Parses `name: value` lines. Names unknown to `sysctl`, which prints a message for each, are left out.
    pub fn read(output: &[u8]) -> Result<Self, ParseError> {
        let text = text(output);
        // Names have dots and no blanks; remarks after a value are ignored.
        let is_name = |name: &str| name.contains('.') && !name.contains(char::is_whitespace);
        let pairs = fields(&text).filter(|(name, _)| is_name(name));
        let value = |value: &str| value.split(" #").next().unwrap_or_default().trim().to_owned();
        let pairs: Vec<_> = pairs.map(|(name, of)| (name.to_owned(), value(of))).collect();
        if pairs.is_empty() {
            Err(ParseError::new(SYSCTL, "no line \"name: value\""))
        } else {
            Ok(Self(pairs))
        }
    }

    /// The value of a name; the new one after a change.
    pub fn get(&self, name: &str) -> Option<&str> {
        let (_, value) = self.0.iter().rfind(|(own, _)| own == name)?;
        Some(value.rsplit_once(" -> ").map_or(value, |(_, new)| new))
    }

    /// The same, as a number.
    pub fn number(&self, name: &str) -> Option<u64> {
        self.get(name)?.parse().ok()
    }
}

/// A version of macOS.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Version {
    /// `26.5.1`.
    pub version: String,
    /// `25F80`: RDMA needs the same build at both ends.
    pub build: String,
}

/// Parses the output of `sw_vers`.
pub fn version(output: &[u8]) -> Result<Version, ParseError> {
    let text = text(output);
    let value = |name: &str| {
        let found = fields(&text).find(|(key, _)| *key == name).map(|(_, value)| value.to_owned());
        found.ok_or_else(|| ParseError::new(VERSIONS, format!("no {name}")))
    };
    Ok(Version { version: value("ProductVersion")?, build: value("BuildVersion")? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_found_by_name_after_a_change_the_new_one() {
        let output = b"hw.memsize: 68719476736\nsysctl: unknown oid 'hw.nothing'\nhw.model: Mac14,6\n\
            iogpu.wired_limit_mb: 0 -> 114688   # after the boot\n";
        let found = Sysctls::read(output).unwrap();
        assert_eq!(found.number("hw.memsize"), Some(64 << 30));
        assert_eq!((found.get("hw.model"), found.get("hw.nothing")), (Some("Mac14,6"), None));
        assert_eq!(found.number("iogpu.wired_limit_mb"), Some(114_688));
        assert!(Sysctls::read(b"sysctl: unknown oid 'hw.nothing'\n").is_err());
    }

    #[test]
    fn a_version_has_a_build() {
        let found =
            version(b"ProductName:\t\tmacOS\nProductVersion:\t\t26.5\nBuildVersion:\t\t25F71\n").unwrap();
        assert_eq!((found.version.as_str(), found.build.as_str()), ("26.5", "25F71"));
        let error = version(b"ProductVersion: 26.5\n").unwrap_err();
        assert_eq!(error.to_string(), "sw_vers printed no BuildVersion");
    }
}
