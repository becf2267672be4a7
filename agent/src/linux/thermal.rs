//! `/sys/class/thermal`: temperatures of the machine.

use std::path::Path;

use super::{folders, name, word};

/// Temperature in degrees Celsius of the hottest zone, with its type; `None` without zones. `sys` is the path
/// of `/sys`.
pub fn warmest(sys: &Path) -> Option<(String, f64)> {
    let zones =
        folders(&sys.join("class/thermal")).into_iter().filter(|path| name(path).starts_with("thermal_zone"));
    let warmth = zones.filter_map(|zone| {
        let thousandths: i64 = word(&zone.join("temp"))?.parse().ok()?;
        Some((word(&zone.join("type")).unwrap_or_else(|| name(&zone)), thousandths))
    });
    warmth
        .max_by_key(|(_, thousandths)| *thousandths)
        .map(|(kind, thousandths)| (kind, thousandths as f64 / 1e3))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn warmest_thermal_zone_wins_and_fans_are_ignored() {
        let sys = tempfile::tempdir().unwrap();
        for (zone, kind, temp) in [
            ("thermal_zone0", "acpitz", "27800"),
            ("thermal_zone1", "x86_pkg_temp", "61000"),
            ("cooling_device0", "fan", "99000"),
        ] {
            let folder = sys.path().join("class/thermal").join(zone);
            fs::create_dir_all(&folder).unwrap();
            fs::write(folder.join("type"), kind).unwrap();
            fs::write(folder.join("temp"), temp).unwrap();
        }
        assert_eq!(warmest(sys.path()), Some(("x86_pkg_temp".to_owned(), 61.0)));
        assert_eq!(warmest(&sys.path().join("nowhere")), None);
    }
}
