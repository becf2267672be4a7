//! Zones: how far from home a request may be answered.

use std::fmt;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// How far from home something is. Each zone has those before it in it.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema,
)]
pub enum Zone {
    /// This cluster. Of providers, those on the gateway's own machine.
    #[default]
    Local,
    /// Other machines of the owner: addresses that are private, link-local or of a tailnet.
    Lan,
    /// Anywhere.
    Cloud,
    /// A value from a newer release. Nothing that is there may be used, and as a limit it is `Local`.
    #[serde(other)]
    #[schemars(skip)]
    Unknown,
}

impl Zone {
    /// The zone of this name; whatever else the name is, `Local`: who misspells a limit gets the strictest.
    pub fn of_label(name: &str) -> Self {
        [Self::Lan, Self::Cloud].into_iter().find(|zone| zone.as_str() == name).unwrap_or_default()
    }

    /// The same as a limit: no farther than this release knows.
    pub fn as_limit(self) -> Self {
        if self == Self::Unknown { Self::Local } else { self }
    }

    /// Its name.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Local => "Local",
            Self::Lan => "Lan",
            Self::Cloud => "Cloud",
            Self::Unknown => "Unknown",
        }
    }
}

impl fmt::Display for Zone {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_label_that_names_no_zone_is_the_strictest() {
        for (name, zone) in [
            ("Local", Zone::Local),
            ("Lan", Zone::Lan),
            ("Cloud", Zone::Cloud),
            ("cloud", Zone::Local),
            ("", Zone::Local),
            ("Mars", Zone::Local),
        ] {
            assert_eq!(Zone::of_label(name), zone, "{name}");
        }
        assert!(Zone::Local < Zone::Lan && Zone::Lan < Zone::Cloud && Zone::Cloud < Zone::Unknown);
        assert_eq!((Zone::Unknown.as_limit(), Zone::Cloud.as_limit()), (Zone::Local, Zone::Cloud));
    }
}
