//! NUMERIC in its binary form: a count of base-10,000 digits, the weight of the first one, a sign, a scale. Amounts are
//! natural numbers of 256 bits, which no decimal type of a library holds.

use std::error::Error;

use bytes::{BufMut, BytesMut};
use tokio_postgres::types::{FromSql, IsNull, ToSql, Type, accepts, to_sql_checked};

use crate::money::Amount;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Numeric(pub Amount);

impl ToSql for Numeric {
    fn to_sql(&self, _: &Type, out: &mut BytesMut) -> Result<IsNull, Box<dyn Error + Sync + Send>> {
        let digits = self.0.to_base_10000();
        // Digits of zero at the low end are not sent.
        let low = digits.iter().take_while(|digit| **digit == 0).count();
        out.put_i16(i16::try_from(digits.len() - low)?);
        out.put_i16(i16::try_from(digits.len().max(1) - 1)?);
        out.put_i16(0); // positive
        out.put_i16(0); // no digits after the point
        for digit in digits.iter().skip(low).rev() {
            out.put_i16(i16::try_from(*digit)?);
        }
        Ok(IsNull::No)
    }
    accepts!(NUMERIC);
    to_sql_checked!();
}

impl<'a> FromSql<'a> for Numeric {
    /// Negative ones, fractions, NaN and infinities are refused.
    fn from_sql(_: &Type, raw: &'a [u8]) -> Result<Numeric, Box<dyn Error + Sync + Send>> {
        let word = |i: usize| -> Result<i16, &'static str> {
            let bytes = raw.get(2 * i..2 * i + 2).ok_or("a short numeric")?;
            Ok(i16::from_be_bytes(bytes.try_into().map_err(|_| "a short numeric")?))
        };
        let (count, weight, sign, scale) = (word(0)?, word(1)?, word(2)?, word(3)?);
        let count = usize::try_from(count).map_err(|_| "a negative count of digits")?;
        if sign != 0 || scale != 0 {
            return Err("no natural number".into());
        }
        if count == 0 {
            return Ok(Numeric(Amount::ZERO));
        }
        // As many digits as the weight says: those that are not there are zeros. 2^256 has 20.
        let digits = usize::try_from(weight).map_err(|_| "a fraction")? + 1;
        if count > digits || digits > 20 {
            return Err("a fraction, or above 256 bits".into());
        }
        let mut all = Vec::with_capacity(digits);
        for i in 0..digits {
            all.push(if i < count { u64::try_from(word(4 + i)?)? } else { 0 });
        }
        Ok(Numeric(Amount::from_base_10000(all).ok_or("above 256 bits")?))
    }
    accepts!(NUMERIC);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(amount: Amount) -> Vec<u8> {
        let mut out = BytesMut::new();
        assert!(matches!(Numeric(amount).to_sql(&Type::NUMERIC, &mut out), Ok(IsNull::No)));
        out.to_vec()
    }

    fn read(words: &[i16]) -> Option<String> {
        let raw: Vec<u8> = words.iter().flat_map(|word| word.to_be_bytes()).collect();
        Numeric::from_sql(&Type::NUMERIC, &raw).ok().map(|n| n.0.to_string())
    }

    #[test]
    fn what_is_written_is_read_and_is_what_postgresql_writes() {
        for text in ["0", "1", "9999", "10000", "10001", "100000000", "123456789012345678901234567890", "7000000000000"]
        {
            let amount: Amount = text.parse().unwrap();
            assert_eq!(Numeric::from_sql(&Type::NUMERIC, &written(amount)).unwrap(), Numeric(amount), "{text}");
        }
        assert_eq!(Numeric::from_sql(&Type::NUMERIC, &written(Amount::MAX)).unwrap(), Numeric(Amount::MAX));
        // As the server sends them: 0, 10000, 10001, 1e20.
        assert_eq!(written(Amount::ZERO), [0; 8]);
        assert_eq!(written(Amount::from_u64(10_000)), [0, 1, 0, 1, 0, 0, 0, 0, 0, 1]);
        assert_eq!(written(Amount::from_u64(10_001)), [0, 2, 0, 1, 0, 0, 0, 0, 0, 1, 0, 1]);
        assert_eq!(read(&[1, 5, 0, 0, 1]).as_deref(), Some("100000000000000000000"));
    }

    #[test]
    fn what_is_no_natural_number_is_refused() {
        for (words, why) in [
            (&[1, 0, 0x4000, 0, 1][..], "negative"),
            (&[0, 0, -0x4000, 0], "NaN"),
            (&[1, 0, 0, 2, 1], "a scale"),
            (&[1, -1, 0, 0, 1], "a fraction"),
            (&[2, 0, 0, 0, 1, 1], "more digits than the weight"),
            (&[1, 0, 0, 0], "a digit is missing"),
            (&[1, 0, 0, 0, 10_000], "no digit"),
            (&[1, 0, 0, 0, -1], "no digit"),
            (&[1, 20, 0, 0, 1], "above 2^256"),
            (&[1, 19, 0, 0, 9_999], "above 2^256"),
            (&[-1, 0, 0, 0], "a negative count"),
            (&[0], "cut off"),
        ] {
            assert_eq!(read(words), None, "{why}");
        }
    }
}
