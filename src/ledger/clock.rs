//! UTC days from unix milliseconds (proleptic Gregorian calendar, Howard Hinnant's `civil_from_days`).

const DAY_MS: u64 = 86_400_000;

/// `2026-12-02`: the key of a day window.
pub(crate) fn day(unix_ms: u64) -> String {
    // Years beyond 9999 would not fit the key; a clock that says so is broken, and stays in the last day.
    let days = i64::try_from((unix_ms / DAY_MS).min(2_932_896)).unwrap_or(0);
    let z = days + 719_468;
    let era = z / 146_097;
    let day_of_era = z - era * 146_097;
    let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_index = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_index + 2) / 5 + 1;
    let month = if month_index < 10 { month_index + 3 } else { month_index - 9 };
    let year = year_of_era + era * 400 + i64::from(month <= 2);
    format!("{year:04}-{month:02}-{day:02}")
}

/// Unix milliseconds of the next UTC midnight.
pub(crate) fn next_midnight(unix_ms: u64) -> u64 {
    (unix_ms / DAY_MS).saturating_add(1).saturating_mul(DAY_MS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn days_begin_at_utc_midnight_leap_days_included() {
        for (ms, expected) in [
            (0, "1970-01-01"),
            (951_782_399_999, "2000-02-28"),
            (951_782_400_000, "2000-02-29"),
            (951_868_800_000, "2000-03-01"),
            (1_767_225_599_999, "2025-12-31"),
            (1_767_225_600_000, "2026-01-01"),
            (1_796_190_599_000, "2026-12-02"),
            (u64::MAX, "9999-12-31"),
        ] {
            assert_eq!(day(ms), expected, "{ms}");
        }
        assert_eq!(next_midnight(1_767_225_599_999), 1_767_225_600_000);
        assert_eq!(next_midnight(1_767_225_600_000), 1_767_225_600_000 + DAY_MS);
    }
}
