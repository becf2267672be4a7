//! What `russet cost` shows: a table with notes below it, or JSON. Pure.

use russet_crds::Money;
use russet_gateway::audit::{UsageReport, UsageTotal};
use serde_json::{Value, json};

use super::CostField;
use super::machines::MachineCosts;
use crate::energy_text::watt_hours;
use crate::get::format_table;

/// What is shown.
pub struct CostReport {
    /// What requests used.
    pub usage: UsageReport,
    /// What a row is for.
    pub by: Vec<CostField>,
    /// Whether it is compared with a price elsewhere.
    pub is_compared: bool,
    /// What machines cost; none where the cluster could not be asked.
    pub machines: Option<MachineCosts>,
}

/// What a row has behind its fields.
fn cells(total: &UsageTotal, is_compared: bool) -> Vec<String> {
    let UsageTotal {
        requests,
        prompt_tokens,
        cached_tokens,
        completion_tokens,
        cost,
        unpriced,
        elsewhere,
        millijoules,
        measured_millijoules: _,
        electricity,
        unmetered,
        unpriced_electricity,
    } = total;
    let numbers = [requests, prompt_tokens, cached_tokens, completion_tokens].map(u64::to_string);
    let unknown = |count: u64| if count > 0 { "+?" } else { "" };
    let (energy, unmetered) = (watt_hours(*millijoules), unknown(*unmetered));
    let money = [
        format!("{cost}{}", unknown(*unpriced)),
        if *millijoules == 0 && !unmetered.is_empty() {
            "?".to_owned()
        } else {
            format!("{energy}{unmetered}")
        },
        match electricity {
            &Money::ZERO if !unmetered.is_empty() || *unpriced_electricity > 0 => "?".to_owned(),
            electricity => format!("{electricity}{}", unknown(total.unmetered + unpriced_electricity)),
        },
    ];
    let elsewhere = is_compared.then(|| elsewhere.to_string());
    numbers.into_iter().chain(money).chain(elsewhere).collect()
}

/// What is left of `price` after these costs: an amount, and whether it is missing instead.
fn difference(price: Money, costs: &[Money]) -> (Money, bool) {
    let costs = costs.iter().fold(Money::ZERO, |sum, cost| sum.plus(*cost));
    (Money { nanos: price.nanos.abs_diff(costs.nanos) }, costs > price)
}

impl CostReport {
    /// As people read it.
    pub fn shown(&self) -> String {
        let Self { usage: report, by, is_compared, machines: _ } = self;
        let heads = by.iter().map(|field| field.name().to_uppercase());
        let columns =
            ["REQUESTS", "PROMPT", "CACHED", "ANSWER", "COST", "ENERGY", "ELECTRICITY"].map(str::to_owned);
        let head: Vec<String> =
            heads.chain(columns).chain(is_compared.then(|| "ELSEWHERE".to_owned())).collect();
        let mut rows = vec![head];
        for (key, total) in &report.totals {
            rows.push(key.iter().cloned().chain(cells(total, *is_compared)).collect());
        }
        if report.totals.len() > 1 {
            let names =
                by.iter().enumerate().map(|(index, _)| if index == 0 { "all" } else { "" }.to_owned());
            rows.push(names.chain(cells(&report.total(), *is_compared)).collect());
        }
        format!("{}\n{}\n", format_table(&rows), self.notes().join("\n"))
    }

    fn notes(&self) -> Vec<String> {
        let UsageReport { totals, kept_answers, uncounted, lost, began: _ } = &self.usage;
        let all = self.usage.total();
        let mut notes = Vec::new();
        if totals.is_empty() {
            notes.push("No request of the period used a token.".to_owned());
        } else {
            notes.push(format!(
                "COST is what providers cost. ENERGY is what machines of this cluster drew while they computed{}.",
                energy_sources(&all)
            ));
        }
        notes.extend(self.machines.as_ref().map(machine_note));
        if self.machines.is_none() {
            notes.push(
                "The cluster could not be asked for its machines: hardware and idle power are not counted."
                    .to_owned(),
            );
        }
        if self.is_compared && !totals.is_empty() {
            notes.push(self.saving());
        }
        for (what, count) in [
            ("Answers of providers without a price, not in COST", all.unpriced),
            ("Requests of which nobody knows what they drew, not in ENERGY", all.unmetered),
            (
                "Requests on machines without a price of electricity, not in ELECTRICITY",
                all.unpriced_electricity,
            ),
            ("Requests that got an answer which was kept, not in the table", *kept_answers),
            ("Requests of an earlier release, which did not write what they used", *uncounted),
            ("Entries of the log that could not be written", *lost),
        ] {
            if count > 0 {
                notes.push(format!("{what}: {count}."));
            }
        }
        notes
    }

    /// What was saved by answering here: with the hardware that has a price, and without what has none.
    fn saving(&self) -> String {
        let all = self.usage.total();
        let MachineCosts { machines, hardware, without_price, .. } =
            self.machines.clone().unwrap_or_default();
        let (left, is_missing) = difference(all.elsewhere, &[all.electricity, hardware]);
        let verdict = if is_missing { "more" } else { "less" };
        let with_hardware = if machines > without_price { " and hardware" } else { "" };
        let without = [
            (all.unmetered + all.unpriced_electricity > 0)
                .then(|| "the electricity that nobody knows".to_owned()),
            (without_price > 0).then(|| format!("the hardware of {without_price} of {machines} machines")),
            (self.usage.uncounted > 0)
                .then(|| format!("{} requests of an earlier release", self.usage.uncounted)),
        ];
        let without: Vec<String> = without.into_iter().flatten().collect();
        let without = match without.is_empty() {
            true => String::new(),
            false => format!(", without {}", without.join(", and without ")),
        };
        format!(
            "What this cluster answered through this gateway would have cost {} there: electricity{with_hardware} cost \
             {left} {verdict} than there{without}.",
            all.elsewhere
        )
    }

    /// For programs.
    pub fn as_json(&self) -> Value {
        let Self { usage, by, is_compared, machines } = self;
        let UsageReport { totals, kept_answers, uncounted, lost, began } = usage;
        let row = |key: &[String], total: &UsageTotal| {
            let mut row = row_json(total, *is_compared);
            for (field, value) in by.iter().zip(key) {
                row[field.name()] = value.as_str().into();
            }
            row
        };
        let rows: Vec<Value> = totals.iter().map(|(key, total)| row(key, total)).collect();
        json!({
            "rows": rows, "total": row(&[], &usage.total()), "keptAnswers": kept_answers, "uncountedRequests": uncounted,
            "lostEntries": lost, "logBegan": began.map(|began| began.to_string()), "machines": machines.as_ref().map(machines_json),
        })
    }
}

/// How much of the energy was measured.
fn energy_sources(total: &UsageTotal) -> String {
    let declared = total.millijoules.saturating_sub(total.measured_millijoules);
    match (total.measured_millijoules, declared) {
        (0, 0) => String::new(),
        (_, 0) => ", by watts that were measured".to_owned(),
        (0, _) => ", by watts that their owner declared".to_owned(),
        (measured, declared) => format!(
            ": {} by watts that were measured, {} by watts that an owner declared",
            watt_hours(measured),
            watt_hours(declared)
        ),
    }
}

/// What machines cost, asked or not.
fn machine_note(costs: &MachineCosts) -> String {
    let MachineCosts {
        machines,
        hardware,
        without_price,
        idle_millijoules,
        idle_electricity,
        without_idle_watts,
        without_electricity_price,
    } = costs;
    let of = |unknown: &usize| match unknown {
        0 => String::new(),
        unknown => format!(" ({unknown} of {machines} machines without a figure)"),
    };
    let unpriced = match without_electricity_price {
        0 => String::new(),
        unpriced => format!(" ({unpriced} of {machines} machines without a price of electricity)"),
    };
    format!(
        "In no row, of machines that are here now, since the log or the period began: hardware written off, \
         {hardware}{}; and what they draw while they only wait, at most {}{}, {idle_electricity}{unpriced}.",
        of(without_price),
        watt_hours(*idle_millijoules),
        of(without_idle_watts)
    )
}

fn row_json(total: &UsageTotal, is_compared: bool) -> Value {
    let UsageTotal {
        requests,
        prompt_tokens,
        cached_tokens,
        completion_tokens,
        cost,
        unpriced,
        elsewhere,
        millijoules,
        measured_millijoules,
        electricity,
        unmetered,
        unpriced_electricity,
    } = total;
    let mut row = json!({
        "requests": requests, "promptTokens": prompt_tokens, "cachedTokens": cached_tokens,
        "completionTokens": completion_tokens, "cost": cost, "unpricedRequests": unpriced,
        "energyMillijoules": millijoules, "measuredMillijoules": measured_millijoules, "unmeteredRequests": unmetered,
        "electricity": electricity, "unpricedElectricityRequests": unpriced_electricity,
    });
    if is_compared {
        row["elsewhere"] = json!(elsewhere);
    }
    row
}

fn machines_json(costs: &MachineCosts) -> Value {
    let MachineCosts {
        machines,
        hardware,
        without_price,
        idle_millijoules,
        idle_electricity,
        without_idle_watts,
        without_electricity_price,
    } = costs;
    json!({
        "machines": machines, "hardware": hardware, "withoutPrice": without_price,
        "idleMillijoules": idle_millijoules, "idleElectricity": idle_electricity, "withoutIdleWatts": without_idle_watts,
        "withoutElectricityPrice": without_electricity_price,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn money(text: &str) -> Money {
        text.parse().unwrap()
    }

    fn report(is_compared: bool, machines: Option<MachineCosts>) -> CostReport {
        let here = UsageTotal {
            requests: 2,
            prompt_tokens: 2000,
            cached_tokens: 400,
            completion_tokens: 200,
            elsewhere: money("2.50"),
            millijoules: 90_000_000,
            measured_millijoules: 72_000_000,
            electricity: money("0.0075"),
            unmetered: 1,
            ..UsageTotal::default()
        };
        let away = UsageTotal { requests: 1, cost: money("0.25"), unpriced: 1, ..UsageTotal::default() };
        let old = UsageTotal { requests: 1, unmetered: 1, ..UsageTotal::default() };
        let key = |key: &str, model: &str| vec![key.to_owned(), model.to_owned()];
        let totals =
            [(key("default/a", "m"), here), (key("default/a", "n"), away), (key("default/b", "m"), old)]
                .into();
        let began = Some("2026-11-01T00:00:00Z".parse().unwrap());
        let usage = UsageReport { totals, kept_answers: 3, uncounted: 0, lost: 1, began };
        CostReport { usage, by: vec![CostField::Key, CostField::Model], is_compared, machines }
    }

    fn machines(hardware: &str) -> Option<MachineCosts> {
        Some(MachineCosts {
            machines: 3,
            hardware: money(hardware),
            without_price: 1,
            idle_millijoules: 36_000_000_000,
            idle_electricity: money("3"),
            without_idle_watts: 0,
            without_electricity_price: 2,
        })
    }

    #[test]
    fn a_table_says_what_was_counted_and_what_was_not() {
        let expected = "\
KEY         MODEL   REQUESTS   PROMPT   CACHED   ANSWER   COST     ENERGY      ELECTRICITY   ELSEWHERE
default/a   m       2          2000     400      200      0.00     25.0 Wh+?   0.0075+?      2.50
default/a   n       1          0        0        0        0.25+?   0 Wh        0.00          0.00
default/b   m       1          0        0        0        0.00     ?           ?             0.00
all                 4          2000     400      200      0.25+?   25.0 Wh+?   0.0075+?      2.50

COST is what providers cost. ENERGY is what machines of this cluster drew while they computed: 20.0 Wh by watts that were measured, 5.000 Wh by watts that an owner declared.
In no row, of machines that are here now, since the log or the period began: hardware written off, 1.50 (1 of 3 machines without a figure); and what they draw while they only wait, at most 10.00 kWh, 3.00 (2 of 3 machines without a price of electricity).
What this cluster answered through this gateway would have cost 2.50 there: electricity and hardware cost 0.9925 less than there, without the electricity that nobody knows, and without the hardware of 1 of 3 machines.
Answers of providers without a price, not in COST: 1.
Requests of which nobody knows what they drew, not in ENERGY: 2.
Requests that got an answer which was kept, not in the table: 3.
Entries of the log that could not be written: 1.
";
        assert_eq!(report(true, machines("1.50")).shown(), expected);
        let dear = report(true, machines("12.4925")).shown();
        assert!(dear.contains("electricity and hardware cost 10.00 more than there"), "{dear}");
        let all_unpriced = MachineCosts { machines: 3, without_price: 3, ..MachineCosts::default() };
        let mut unpriced = report(true, Some(all_unpriced));
        unpriced.usage.uncounted = 4;
        let unpriced = unpriced.shown();
        for part in [
            "there: electricity cost 2.4925 less than there, without the electricity that nobody knows",
            ", and without the hardware of 3 of 3 machines, and without 4 requests of an earlier release.",
        ] {
            assert!(unpriced.contains(part), "{unpriced}");
        }
        let alone = report(true, None).shown();
        assert!(alone.contains("electricity cost 2.4925 less than there"), "{alone}");
        assert!(alone.contains("The cluster could not be asked for its machines"), "{alone}");
        let plain = report(false, None).shown();
        assert!(!plain.contains("ELSEWHERE") && !plain.contains("there"), "{plain}");
        let nothing = CostReport { usage: UsageReport::default(), ..report(true, None) }.shown();
        assert!(nothing.contains("No request of the period used a token."), "{nothing}");
    }

    #[test]
    fn json_has_the_same_figures() {
        let json = report(true, machines("1.50")).as_json();
        assert_eq!(json["rows"][0]["key"], "default/a");
        let total = &json["total"];
        assert_eq!((&total["cost"], &total["elsewhere"]), (&json!("0.25"), &json!("2.50")));
        assert_eq!(
            (&total["energyMillijoules"], &total["electricity"]),
            (&json!(90_000_000), &json!("0.0075"))
        );
        assert_eq!(
            (&total["measuredMillijoules"], &total["unmeteredRequests"]),
            (&json!(72_000_000), &json!(2))
        );
        assert_eq!(
            (&json["machines"]["hardware"], &json["machines"]["withoutPrice"]),
            (&json!("1.50"), &json!(1))
        );
        assert_eq!(json["machines"]["withoutElectricityPrice"], 2);
        assert_eq!(json["logBegan"], "2026-11-01T00:00:00Z");
        let alone = report(false, None).as_json();
        assert_eq!((&alone["machines"], &alone["total"]["elsewhere"]), (&Value::Null, &Value::Null));
    }
}
