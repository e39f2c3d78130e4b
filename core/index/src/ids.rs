//! Prompts of token ids inside a JSON object, read straight into numbers.
//!
//! * What is found is exactly what a JSON parser would find: anything that could be read in two ways (the member comes
//!   twice, a name with an escape) is left to the parser.
//! * The rest is not judged. Where a value is cut out that a parser would have accepted there, the text is JSON exactly
//!   if it is JSON with `[]` in the value's place.
//! * Linear in the text, without recursion; nothing is held but the ids.

use std::ops::Range;

/// The value of a member: one prompt or several.
#[derive(Debug, PartialEq, Eq)]
pub struct Lifted {
    /// Where it stands in the text.
    pub place: Range<usize>,
    /// Its prompts, none of them empty, at least one.
    pub prompts: Vec<Vec<u32>>,
}

/// Look for a member whose value is an array of ids, or an array of at most `most` arrays of ids.
///
/// An id is a plain integer of 32 bits. `None` where there is no such member in no doubt.
#[must_use]
pub fn lift(text: &[u8], member: &str, most: usize) -> Option<Lifted> {
    let mut reader = Reader { text, place: 0 };
    let mut found = None;
    reader.expect(b'{')?;
    loop {
        let name = reader.name()?;
        reader.expect(b':')?;
        if name == member.as_bytes() {
            if found.is_some() {
                return None;
            }
            reader.skip_space();
            let start = reader.place;
            let prompts = reader.prompts(most)?;
            found = Some(Lifted { place: start..reader.place, prompts });
        } else {
            reader.skip_value()?;
        }
        match reader.next()? {
            b',' => {}
            b'}' => break,
            _ => return None,
        }
    }
    reader.skip_space();
    found.filter(|_| reader.place == text.len())
}

struct Reader<'a> {
    text: &'a [u8],
    place: usize,
}

impl<'a> Reader<'a> {
    fn skip_space(&mut self) {
        while matches!(self.text.get(self.place), Some(b' ' | b'\n' | b'\r' | b'\t')) {
            self.place += 1;
        }
    }

    /// The next byte that is no space.
    fn next(&mut self) -> Option<u8> {
        self.skip_space();
        let byte = *self.text.get(self.place)?;
        self.place += 1;
        Some(byte)
    }

    fn expect(&mut self, byte: u8) -> Option<()> {
        (self.next()? == byte).then_some(())
    }

    /// A member's name, where it is written without escapes.
    fn name(&mut self) -> Option<&'a [u8]> {
        self.expect(b'"')?;
        let start = self.place;
        self.skip_string()?;
        let name = &self.text[start..self.place - 1];
        (!name.contains(&b'\\')).then_some(name)
    }

    /// From behind a string's opening quote to behind the closing one.
    fn skip_string(&mut self) -> Option<()> {
        loop {
            let rest = &self.text[self.place..];
            let special = rest.iter().position(|byte| matches!(byte, b'"' | b'\\'))?;
            self.place += special + 1;
            if rest[special] == b'"' {
                return Some(());
            }
            if self.place == self.text.len() {
                return None;
            }
            self.place += 1; // what is escaped
        }
    }

    fn skip_value(&mut self) -> Option<()> {
        let mut depth = 0_usize;
        loop {
            match self.next()? {
                b'"' => self.skip_string()?,
                b'[' | b'{' => depth += 1,
                b']' | b'}' => depth = depth.checked_sub(1)?,
                b',' | b':' if depth > 0 => {}
                _ => {
                    // a number or a word
                    let ends = |byte: &u8| matches!(byte, b',' | b']' | b'}' | b' ' | b'\n' | b'\r' | b'\t');
                    self.place += self.text[self.place..].iter().position(ends)?;
                }
            }
            if depth == 0 {
                return Some(());
            }
        }
    }

    fn prompts(&mut self, most: usize) -> Option<Vec<Vec<u32>>> {
        self.expect(b'[')?;
        self.skip_space();
        if self.text.get(self.place) != Some(&b'[') {
            return self.ids().map(|ids| vec![ids]);
        }
        let mut prompts = Vec::new();
        loop {
            self.expect(b'[')?;
            if prompts.len() == most {
                return None;
            }
            prompts.push(self.ids()?);
            match self.next()? {
                b',' => {}
                b']' => return Some(prompts),
                _ => return None,
            }
        }
    }

    /// From behind the opening bracket of an array to behind the closing one.
    fn ids(&mut self) -> Option<Vec<u32>> {
        let mut ids = Vec::new();
        loop {
            self.skip_space();
            ids.push(self.id()?);
            match self.next()? {
                b',' => {}
                b']' => return Some(ids),
                _ => return None,
            }
        }
    }

    fn id(&mut self) -> Option<u32> {
        let rest = &self.text[self.place..];
        let (id, digits) = match rest.first_chunk().and_then(few_digits) {
            Some(read) => read,
            None => many_digits(rest)?,
        };
        if digits > 1 && rest[0] == b'0' {
            return None;
        }
        self.place += digits;
        Some(id)
    }
}

/// A number of one to seven digits at the beginning of eight bytes, and how many they are, at once.
fn few_digits(text: &[u8; 8]) -> Option<(u32, usize)> {
    // The first byte is the lowest. A digit becomes its value; what is none has its highest bit set, or gets it by 0x76.
    let values = u64::from_le_bytes(*text) ^ 0x3030_3030_3030_3030;
    let others = (values.wrapping_add(0x7676_7676_7676_7676) | values) & 0x8080_8080_8080_8080;
    let digits = others.trailing_zeros() / 8;
    if others == 0 || digits == 0 {
        return None;
    }
    // The last digit to the highest byte, zeros before the first; then pairs, fours and all eight are put together.
    let ones = values << (64 - 8 * digits);
    let pairs = (ones * 10 + (ones >> 8)) & 0x00ff_00ff_00ff_00ff;
    let fours = (pairs * 100 + (pairs >> 16)) & 0x0000_ffff_0000_ffff;
    let number = (fours.wrapping_mul(10_000) + (fours >> 32)) & 0xffff_ffff;
    Some((number as u32, digits as usize))
}

fn many_digits(text: &[u8]) -> Option<(u32, usize)> {
    let digits = text.iter().position(|byte| !byte.is_ascii_digit())?;
    if !(1..=10).contains(&digits) {
        return None;
    }
    let number = text[..digits].iter().fold(0, |number, digit| number * 10 + u64::from(digit - b'0'));
    Some((u32::try_from(number).ok()?, digits))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn prompts(text: &str) -> Option<Vec<Vec<u32>>> {
        let lifted = lift(text.as_bytes(), "prompt", 3)?;
        assert!(text[lifted.place].starts_with('['));
        Some(lifted.prompts)
    }

    #[test]
    fn one_prompt_and_several() {
        assert_eq!(prompts(r#"{"prompt":[1,2,4294967295,0]}"#), Some(vec![vec![1, 2, u32::MAX, 0]]));
        assert_eq!(prompts(" {\n\"prompt\" :\t[ [ 1 , 2 ] , [3]\r] } "), Some(vec![vec![1, 2], vec![3]]));
        assert_eq!(prompts(r#"{"a":{"b":["\"}]",{}]},"prompt":[7],"c":-1.5e3,"d":"\\"}"#), Some(vec![vec![7]]));
        assert_eq!(prompts(r#"{"prompt":[[1],[2],[3]]}"#).map(|found| found.len()), Some(3));
    }

    #[test]
    fn what_is_left_to_the_parser() {
        for text in [
            "",
            "[1]",
            "{}",
            r#"{"other":[1]}"#,
            r#"{"a":{"prompt":[1]}}"#,
            r#"{"prompt":"text"}"#,
            r#"{"prompt":[]}"#,
            r#"{"prompt":[[]]}"#,
            r#"{"prompt":[[1],[]]}"#,
            r#"{"prompt":[[1],2]}"#,
            r#"{"prompt":[1,[2]]}"#,
            r#"{"prompt":[[1],[2],[3],[4]]}"#,
            r#"{"prompt":[4294967296]}"#,
            r#"{"prompt":[99999999999999999999]}"#,
            r#"{"prompt":[-1]}"#,
            r#"{"prompt":[1.0]}"#,
            r#"{"prompt":[1e3]}"#,
            r#"{"prompt":[01]}"#,
            r#"{"prompt":[true]}"#,
            r#"{"prompt":[1,]}"#,
            r#"{"prompt":[1 2]}"#,
            r#"{"prompt":[1],"prompt":[2]}"#,
            r#"{"prompt":[1],"prom\u0070t":[2]}"#,
            r#"{"prompt":[1]"#,
            r#"{"prompt":[1]} x"#,
            r#"{"prompt":[1]]"#,
            r#"{"a":"\"#,
            r#"{"a":]],"prompt":[1]}"#,
        ] {
            assert_eq!(prompts(text), None, "{text}");
        }
    }

    proptest! {
        #[test]
        fn digits_are_read_alike(text in "[0-9]{0,9}[^0-9].{8}", byte in any::<u8>(), at in 0_usize..8) {
            let mut text = *text.as_bytes().first_chunk().unwrap();
            for place in [8, at] {
                if let Some(there) = text.get_mut(place) {
                    *there = byte;
                }
                if let Some(read) = few_digits(&text) {
                    prop_assert_eq!(many_digits(&text), Some(read));
                } else {
                    prop_assert!(!text[0].is_ascii_digit() || text.iter().all(u8::is_ascii_digit));
                }
            }
        }

        #[test]
        fn any_text_is_taken(text in "[\\[\\]{}\",:\\\\a0-9 pt]{0,40}|\\{\"prompt\":[\\[\\]{}\",:0-9 ]{0,30}\\}") {
            if let Some(lifted) = lift(text.as_bytes(), "prompt", 2) {
                prop_assert!(lifted.prompts.len() <= 2 && lifted.prompts.iter().all(|ids| !ids.is_empty()));
                let value = &text[lifted.place];
                let read = format!("{:?}", lifted.prompts).replace(' ', "");
                let value = value.replace([' ', '\n', '\t', '\r'], "");
                prop_assert!(read == value || read == format!("[{value}]"), "{} {}", read, value);
            }
        }
    }
}
