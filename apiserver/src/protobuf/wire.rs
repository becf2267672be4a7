//! The protobuf wire format: tags, varints, lengths.
//!
//! Not here: the meaning of fields.

/// The encoded value of a field.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Payload<'a> {
    /// Wire type 0.
    Varint(u64),
    /// Wire types 1 and 5, little-endian bytes.
    Fixed(&'a [u8]),
    /// Wire type 2.
    Bytes(&'a [u8]),
}

/// Iterator over the fields of a message.
pub struct Fields<'a> {
    rest: &'a [u8],
}

impl<'a> Fields<'a> {
    /// The fields of `message`.
    pub fn new(message: &'a [u8]) -> Fields<'a> {
        Fields { rest: message }
    }

    fn varint(&mut self) -> Result<u64, String> {
        let mut value = 0_u64;
        for (index, byte) in self.rest.iter().enumerate().take(10) {
            value |= u64::from(byte & 0x7f).checked_shl(7 * index as u32).unwrap_or_default();
            if byte & 0x80 == 0 {
                self.rest = &self.rest[index + 1..];
                return Ok(value);
            }
        }
        Err("a number is truncated".into())
    }

    fn take(&mut self, length: u64) -> Result<&'a [u8], String> {
        let have = self.rest.len();
        let length = usize::try_from(length).ok().filter(|length| *length <= have);
        let Some((taken, rest)) = length.and_then(|length| self.rest.split_at_checked(length)) else {
            return Err(format!("a field is longer than the {have} bytes left"));
        };
        self.rest = rest;
        Ok(taken)
    }

    fn field(&mut self) -> Result<(u64, Payload<'a>), String> {
        let tag = self.varint()?;
        let payload = match tag & 7 {
            0 => Payload::Varint(self.varint()?),
            1 => Payload::Fixed(self.take(8)?),
            2 => {
                let length = self.varint()?;
                Payload::Bytes(self.take(length)?)
            }
            5 => Payload::Fixed(self.take(4)?),
            other => return Err(format!("unknown wire type {other}")),
        };
        Ok((tag >> 3, payload))
    }
}

impl<'a> Iterator for Fields<'a> {
    type Item = Result<(u64, Payload<'a>), String>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.rest.is_empty() {
            return None;
        }
        let field = self.field();
        if field.is_err() {
            self.rest = &[];
        }
        Some(field)
    }
}

#[cfg(test)]
mod tests {
    use super::{Fields, Payload};

    #[test]
    fn fields_are_read_and_broken_ones_end_the_message() {
        let message = [0x08, 0x96, 0x01, 0x12, 0x02, b'h', b'i', 0x1d, 1, 2, 3, 4];
        let fields: Vec<_> = Fields::new(&message).collect();
        assert_eq!(
            fields,
            [
                Ok((1, Payload::Varint(150))),
                Ok((2, Payload::Bytes(b"hi"))),
                Ok((3, Payload::Fixed(&[1, 2, 3, 4]))),
            ]
        );
        for broken in [&[0x12, 0x05, b'h'][..], &[0x08, 0x80], &[0x0b], &[0xff; 12]] {
            let fields: Vec<_> = Fields::new(broken).collect();
            assert!(fields.len() == 1 && fields[0].is_err(), "{broken:?}");
        }
    }
}
