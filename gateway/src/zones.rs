//! How far from home a request may be answered. Everybody who has a say only narrows that: the ModelRoute, its rule, the
//! namespaces of route and key, the key, and the request itself. This is the one place where a request becomes one that may
//! leave: only a [`Cleared`] one reaches a socket to a provider or to an endpoint of a Pipeline, and only [`ZoneLimit::clear`] makes those.

use russet_crds::Zone;

use crate::error::{ErrorKind, GatewayError};

/// The zone in which a request stays, and who says so.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ZoneLimit {
    zone: Zone,
    by: String,
}

impl ZoneLimit {
    /// That of a ModelRoute: nothing leaves unless one says that it may.
    pub(crate) fn of_route(zone: Zone, by: String) -> Self {
        Self { zone: zone.as_limit(), by }
    }

    /// The same with another one that has a say; of equal ones the first is named.
    #[must_use]
    pub(crate) fn narrowed(self, other: Option<Self>) -> Self {
        match other {
            Some(other) if other.zone < self.zone => other,
            _ => self,
        }
    }

    /// What a label `russet.dev/zone` says; `on` is what has it.
    pub(crate) fn of_label(value: &str, on: &str) -> Self {
        let zone = Zone::of_label(value);
        let shown = if zone.as_str() == value {
            String::new()
        } else {
            format!(", which is no zone and means {zone}")
        };
        Self { zone, by: format!("the label russet.dev/zone={value} of {on}{shown}") }
    }

    /// Whether a request may go to a zone.
    pub fn allows(&self, zone: Zone) -> bool {
        // `Unknown` is beyond every limit.
        zone <= self.zone
    }

    /// The request as one that may go there, such as to `ModelProvider default/openrouter`, in this zone, or the error that
    /// says why it may not.
    pub(crate) fn clear<T>(&self, request: T, zone: Zone, to: &str) -> Result<Cleared<T>, GatewayError> {
        if self.allows(zone) {
            Ok(Cleared { request, zone, limit: self.clone() })
        } else {
            Err(self.denied(zone, to))
        }
    }

    /// The error of a request that could only be answered beyond the limit.
    pub(crate) fn denied(&self, zone: Zone, to: &str) -> GatewayError {
        let message = format!(
            "the request stays in the zone {}, as {} says, and {to} is in the zone {zone}",
            self.zone, self.by
        );
        GatewayError::new(ErrorKind::ZoneDenied, message)
    }

    /// The zone.
    pub fn zone(&self) -> Zone {
        self.zone
    }

    /// Who says so.
    pub fn by(&self) -> &str {
        &self.by
    }
}

/// A request that may go to this zone, and no farther.
pub(crate) struct Cleared<T> {
    request: T,
    zone: Zone,
    limit: ZoneLimit,
}

impl<T> Cleared<T> {
    /// The request, the zone for which it was cleared, and the limit that allows it.
    pub(crate) fn into_parts(self) -> (T, Zone, ZoneLimit) {
        let Self { request, zone, limit } = self;
        (request, zone, limit)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whoever_has_a_say_only_narrows() {
        let zones = [Zone::Local, Zone::Lan, Zone::Cloud, Zone::Unknown];
        let limit = |zone: Zone, by: &str| ZoneLimit { zone: zone.as_limit(), by: by.to_owned() };
        for route in zones {
            for label in zones {
                for header in [None, Some(Zone::Local), Some(Zone::Lan), Some(Zone::Cloud)] {
                    let all = ZoneLimit::of_route(route, "route".into())
                        .narrowed(Some(limit(label, "label")))
                        .narrowed(header.map(|zone| limit(zone, "header")));
                    let strictest =
                        [Some(route), Some(label), header].into_iter().flatten().map(Zone::as_limit).min();
                    assert_eq!(Some(all.zone()), strictest);
                    for to in zones {
                        let cleared = all.clear((), to, "p").map(Cleared::into_parts);
                        assert_eq!(cleared.is_ok(), Some(to) <= strictest, "{route} {label} {header:?} {to}");
                    }
                }
            }
        }
    }

    #[test]
    fn who_narrows_is_named() {
        let limit = ZoneLimit::of_route(Zone::Cloud, "spec.zone of ModelRoute default/auto".into())
            .narrowed(Some(ZoneLimit::of_label("lan", "AccessKey default/kid")))
            .narrowed(Some(ZoneLimit::of_label("Local", "the header")));
        let error = limit.denied(Zone::Cloud, "ModelProvider default/openrouter");
        assert_eq!(error.kind, ErrorKind::ZoneDenied);
        assert_eq!(
            error.message,
            "the request stays in the zone Local, as the label russet.dev/zone=lan of AccessKey default/kid, which is no zone \
             and means Local says, and ModelProvider default/openrouter is in the zone Cloud"
        );
    }
}
