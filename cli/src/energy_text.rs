//! Energy as people read it.

/// Thousandths of a joule of a watt hour.
const WATT_HOUR_MILLIJOULES: f64 = 3_600_000.0;

/// Watt hours, or kilowatt hours where there are a thousand.
pub fn watt_hours(millijoules: u64) -> String {
    let hours = millijoules as f64 / WATT_HOUR_MILLIJOULES;
    match hours {
        _ if millijoules == 0 => "0 Wh".to_owned(),
        hours if hours >= 999.95 => format!("{:.2} kWh", hours / 1000.0),
        hours if hours >= 10.0 => format!("{hours:.1} Wh"),
        hours => format!("{hours:.3} Wh"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn energy_is_shown_in_watt_hours_of_a_fitting_size() {
        for (millijoules, expected) in [
            (0, "0 Wh"),
            (1, "0.000 Wh"),
            (240_000, "0.067 Wh"),
            (3_600_000, "1.000 Wh"),
            (90_000_000, "25.0 Wh"),
            (3_600_000_000, "1.00 kWh"),
            (3_599_990_000, "1.00 kWh"),
            (123_456_000_000, "34.29 kWh"),
        ] {
            assert_eq!(watt_hours(millijoules), expected);
        }
    }
}
