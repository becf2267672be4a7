//! The element types of GGUF. Most pack a block of 32 or 256 neighbours of a row together with what scales them.

use std::fmt;

/// A type whose tensors are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the format's own names")]
pub enum BlockType {
    F32,
    F16,
    Bf16,
    F64,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q2K,
    Q3K,
    Q4K,
    Q5K,
    Q6K,
    Q8K,
    Iq1S,
    Iq1M,
    Iq2Xxs,
    Iq2Xs,
    Iq2S,
    Iq3Xxs,
    Iq3S,
    Iq4Nl,
    Iq4Xs,
    Mxfp4,
}

/// Number in the file, name, elements of a block, bytes of a block, and the type where it is read.
type Row = (u32, &'static str, u64, u64, Option<BlockType>);

/// Every type of the format; numbers that are missing were given up.
const TYPES: &[Row] = &[
    (0, "F32", 1, 4, Some(BlockType::F32)),
    (1, "F16", 1, 2, Some(BlockType::F16)),
    (2, "Q4_0", 32, 18, Some(BlockType::Q4_0)),
    (3, "Q4_1", 32, 20, Some(BlockType::Q4_1)),
    (6, "Q5_0", 32, 22, Some(BlockType::Q5_0)),
    (7, "Q5_1", 32, 24, Some(BlockType::Q5_1)),
    (8, "Q8_0", 32, 34, Some(BlockType::Q8_0)),
    (9, "Q8_1", 32, 36, None),
    (10, "Q2_K", 256, 84, Some(BlockType::Q2K)),
    (11, "Q3_K", 256, 110, Some(BlockType::Q3K)),
    (12, "Q4_K", 256, 144, Some(BlockType::Q4K)),
    (13, "Q5_K", 256, 176, Some(BlockType::Q5K)),
    (14, "Q6_K", 256, 210, Some(BlockType::Q6K)),
    (15, "Q8_K", 256, 292, Some(BlockType::Q8K)),
    (16, "IQ2_XXS", 256, 66, Some(BlockType::Iq2Xxs)),
    (17, "IQ2_XS", 256, 74, Some(BlockType::Iq2Xs)),
    (18, "IQ3_XXS", 256, 98, Some(BlockType::Iq3Xxs)),
    (19, "IQ1_S", 256, 50, Some(BlockType::Iq1S)),
    (20, "IQ4_NL", 32, 18, Some(BlockType::Iq4Nl)),
    (21, "IQ3_S", 256, 110, Some(BlockType::Iq3S)),
    (22, "IQ2_S", 256, 82, Some(BlockType::Iq2S)),
    (23, "IQ4_XS", 256, 136, Some(BlockType::Iq4Xs)),
    (24, "I8", 1, 1, None),
    (25, "I16", 1, 2, None),
    (26, "I32", 1, 4, None),
    (27, "I64", 1, 8, None),
    (28, "F64", 1, 8, Some(BlockType::F64)),
    (29, "IQ1_M", 256, 56, Some(BlockType::Iq1M)),
    (30, "BF16", 1, 2, Some(BlockType::Bf16)),
    (34, "TQ1_0", 256, 54, None),
    (35, "TQ2_0", 256, 66, None),
    (39, "MXFP4", 32, 17, Some(BlockType::Mxfp4)),
];

/// What a file says of a tensor's type: its size is known for all of them, how it is read for most.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct ElementType(&'static Row);

impl ElementType {
    /// The type of this number.
    pub fn of(number: u32) -> Option<Self> {
        TYPES.iter().find(|row| row.0 == number).map(Self)
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        self.0.1
    }

    /// Neighbours of a row that are stored together.
    pub fn block_elements(self) -> u64 {
        self.0.2
    }

    /// Bytes of a block.
    pub fn block_bytes(self) -> u64 {
        self.0.3
    }

    /// How it is read, where this release can.
    pub fn block_type(self) -> Option<BlockType> {
        self.0.4
    }
}

impl fmt::Debug for ElementType {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(self.name())
    }
}

impl BlockType {
    fn row(self) -> &'static Row {
        // Every variant has a row; the test below looks for each.
        TYPES.iter().find(|row| row.4 == Some(self)).unwrap_or(&TYPES[0])
    }

    /// Neighbours of a row that are stored together.
    pub fn block_elements(self) -> usize {
        self.row().2 as usize
    }

    /// Bytes of a block.
    pub fn block_bytes(self) -> usize {
        self.row().3 as usize
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        self.row().1
    }

    /// Whether each element stands by itself.
    pub fn is_plain(self) -> bool {
        self.block_elements() == 1
    }
}

/// The types that are read, for messages.
pub fn list() -> String {
    TYPES.iter().filter(|row| row.4.is_some()).map(|row| row.1).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_type_that_is_read_has_a_row_of_its_own() {
        let read: Vec<BlockType> = TYPES.iter().filter_map(|row| row.4).collect();
        assert_eq!(read.len(), 25);
        for row in TYPES {
            assert_eq!(TYPES.iter().filter(|other| other.0 == row.0).count(), 1, "{}", row.1);
            if let Some(kind) = row.4 {
                assert_eq!((kind.name(), kind.block_bytes()), (row.1, row.3 as usize));
            }
        }
    }
}
