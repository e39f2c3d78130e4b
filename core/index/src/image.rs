//! What the index knows of one worker, as bytes: the form. `kvsync/index/image.py` says it in full, and is its twin.
//!
//! What must always hold: whatever the bytes are, they are an image that can be taken as a whole, or an [`ImageError`].
//! So no hash and no key stands twice, and every number is one that the index itself could have come to.

use std::borrow::Cow;
use std::fmt;

use hashbrown::HashSet;
use xxhash_rust::xxh3::xxh3_64;

use crate::event::{EngineHash, Tier};
use crate::hits::Kind;
use crate::key::BlockKey;
use crate::wire::MAX_GROUPS;

const MAGIC: [u8; 8] = *b"kvsimage";
/// Names the layout and how block keys are made. `VERSION` of `image.py`.
const VERSION: u16 = 1;

const HEAD: usize = 36;
const GROUP: usize = 22;
const PLACE: usize = 9;
const PLAIN: usize = 20;
/// The least that a block takes which is not plain: form, number of places, a name of a byte, copies in one place.
const OTHER: usize = 3 + 3 + 6;
const DIGEST: usize = 8;
const MAX_PLACES: u16 = 3 * MAX_GROUPS as u16;
const DEEPEST: u32 = (1 << 30) - 1;
const HAS_KEY: u8 = 4;
const SHARES_KEY: u8 = 8;
const DOUBT: u16 = 0x8000;

/// Why bytes are no image that can be taken.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageError(Cow<'static, str>);

impl ImageError {
    pub(crate) fn new(what: impl Into<Cow<'static, str>>) -> Self {
        Self(what.into())
    }
}

impl fmt::Display for ImageError {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.write_str(&self.0)
    }
}

impl std::error::Error for ImageError {}

fn damaged(what: &str) -> ImageError {
    ImageError::new(format!("a damaged image: {what}"))
}

fn check(holds: bool, what: &str) -> Result<(), ImageError> {
    if holds { Ok(()) } else { Err(damaged(what)) }
}

/// How far a mark has come: none, a batch came since, none came.
pub(crate) type MarkLevel = u8;

/// What stands in the flags.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Flags {
    pub hides_keys: bool,
    pub shows_unknown_keys: bool,
    pub lost: bool,
    pub overfull: bool,
    pub eagle: bool,
    /// Of re-announcing and of hidden keys.
    pub marks: [MarkLevel; 2],
}

impl Flags {
    fn bits(self) -> u16 {
        let flags = [self.hides_keys, self.shows_unknown_keys, self.lost, self.overfull, self.eagle];
        let bits = flags.iter().enumerate().fold(0, |bits, (at, flag)| bits | u16::from(*flag) << at);
        bits | u16::from(self.marks[0]) << 5 | u16::from(self.marks[1]) << 7
    }

    fn of(bits: u16) -> Option<Self> {
        let flag = |at: u16| bits >> at & 1 == 1;
        let marks = [5, 7].map(|at| (bits >> at & 3) as MarkLevel);
        let [hides_keys, shows_unknown_keys, lost, overfull, eagle] = [0, 1, 2, 3, 4].map(flag);
        (bits >> 9 == 0 && !marks.contains(&3)).then_some(Self {
            hides_keys,
            shows_unknown_keys,
            lost,
            overfull,
            eagle,
            marks,
        })
    }
}

/// A KV-cache group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct GroupImage {
    pub number: i64,
    pub kind: Option<Kind>,
    pub window: i64,
    pub block_size: u32,
    pub sparse: bool,
}

const KINDS: [Option<Kind>; 6] =
    [None, Some(Kind::Full), Some(Kind::Window), Some(Kind::State), Some(Kind::Chunked), Some(Kind::Unproven)];

/// A plain block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Plain {
    pub key: BlockKey,
    pub name: u64,
    pub depth: u32,
}

/// A block that is not plain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Other<'a> {
    pub name: EngineHash<'a>,
    /// Key and depth.
    pub spot: Option<(BlockKey, u32)>,
    pub shares_key: bool,
    /// Number of the place, copies, doubt; ascending.
    pub copies: Vec<(u16, u32, bool)>,
}

/// What precedes the blocks.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Head {
    pub flags: Flags,
    /// Ascending by number.
    pub groups: Vec<GroupImage>,
    /// The first is home.
    pub places: Vec<(Tier, i64)>,
}

/// An image about to be written.
#[derive(Debug)]
pub(crate) struct Writer {
    bytes: Vec<u8>,
    plain: u64,
    others: u64,
}

impl Writer {
    /// `plain`: about how many plain blocks there will be.
    pub(crate) fn new(model: &str, head: &Head, plain: usize) -> Option<Self> {
        let mut bytes = Vec::with_capacity(HEAD + model.len() + plain * PLAIN + DIGEST);
        bytes.extend_from_slice(&MAGIC);
        for number in [VERSION, head.flags.bits()] {
            bytes.extend_from_slice(&number.to_le_bytes());
        }
        for number in [head.groups.len(), head.places.len()] {
            bytes.extend_from_slice(&u16::try_from(number).ok()?.to_le_bytes());
        }
        bytes.extend_from_slice(&u32::try_from(model.len()).ok()?.to_le_bytes());
        bytes.resize(HEAD, 0); // the numbers of blocks, when they are known
        bytes.extend_from_slice(model.as_bytes());
        for group in &head.groups {
            bytes.extend_from_slice(&group.number.to_le_bytes());
            bytes.extend_from_slice(&group.window.to_le_bytes());
            bytes.extend_from_slice(&group.block_size.to_le_bytes());
            let kind = KINDS.iter().position(|kind| *kind == group.kind)?;
            bytes.extend_from_slice(&[kind as u8, u8::from(group.sparse)]);
        }
        for (tier, group) in &head.places {
            bytes.push(Tier::ALL.iter().position(|other| other == tier)? as u8);
            bytes.extend_from_slice(&group.to_le_bytes());
        }
        Some(Self { bytes, plain: 0, others: 0 })
    }

    /// To be called for all plain blocks before the others.
    pub(crate) fn plain(&mut self, block: Plain) {
        let mut bytes = [0; PLAIN];
        bytes[..8].copy_from_slice(&block.key.0.to_le_bytes());
        bytes[8..16].copy_from_slice(&block.name.to_le_bytes());
        bytes[16..].copy_from_slice(&block.depth.min(DEEPEST).to_le_bytes());
        self.bytes.extend_from_slice(&bytes);
        self.plain += 1;
    }

    /// `None` where a figure is larger than an engine can make it.
    pub(crate) fn other(&mut self, block: &Other<'_>) -> Option<()> {
        let (kind, number) = match &block.name {
            EngineHash::Unsigned(number) => (0, Some(number.to_le_bytes())),
            EngineHash::Negative(number) => (1, Some(number.to_le_bytes())),
            EngineHash::Bytes(_) => (2, None),
            EngineHash::Text(_) => (3, None),
        };
        let key = if block.spot.is_some() { HAS_KEY } else { 0 };
        let form = kind | key | if block.shares_key { SHARES_KEY } else { 0 };
        self.bytes.push(form);
        self.bytes.extend_from_slice(&u16::try_from(block.copies.len()).ok()?.to_le_bytes());
        if let Some(number) = number {
            self.bytes.extend_from_slice(&number);
        } else {
            let content = block.name.content();
            self.bytes.extend_from_slice(&u16::try_from(content.len()).ok()?.to_le_bytes());
            self.bytes.extend_from_slice(content);
        }
        if let Some((key, depth)) = block.spot {
            self.bytes.extend_from_slice(&key.0.to_le_bytes());
            self.bytes.extend_from_slice(&depth.min(DEEPEST).to_le_bytes());
        }
        for (place, count, doubt) in &block.copies {
            let place = if *doubt { place | DOUBT } else { *place };
            self.bytes.extend_from_slice(&place.to_le_bytes());
            self.bytes.extend_from_slice(&count.to_le_bytes());
        }
        self.others += 1;
        Some(())
    }

    pub(crate) fn done(self) -> Vec<u8> {
        let Self { mut bytes, plain, others } = self;
        bytes[HEAD - 16..HEAD - 8].copy_from_slice(&plain.to_le_bytes());
        bytes[HEAD - 8..HEAD].copy_from_slice(&others.to_le_bytes());
        let digest = xxh3_64(&bytes);
        bytes.extend_from_slice(&digest.to_le_bytes());
        bytes
    }
}

/// An image that was read.
#[derive(Debug)]
pub(crate) struct Image<'a> {
    pub model: &'a str,
    pub head: Head,
    plain: &'a [[u8; PLAIN]],
    pub others: Vec<Other<'a>>,
}

impl<'a> Image<'a> {
    /// Read an image, and see that it is one.
    pub(crate) fn decode(bytes: &'a [u8]) -> Result<Self, ImageError> {
        if bytes.len() < HEAD + DIGEST {
            let least = HEAD + DIGEST;
            return Err(ImageError::new(format!("an image has at least {least} bytes, not {}", bytes.len())));
        }
        let (body, digest) = bytes.split_last_chunk::<DIGEST>().expect("as long as that");
        let mut reader = Reader(body);
        if reader.array::<8>()? != MAGIC {
            return Err(ImageError::new("not an image of an index"));
        }
        let version = reader.u16()?;
        if version != VERSION {
            return Err(ImageError::new(format!("an image of version {version}, and {VERSION} is read here")));
        }
        if xxh3_64(body) != u64::from_le_bytes(*digest) {
            return Err(ImageError::new("a damaged image: its digest differs"));
        }
        let flags = Flags::of(reader.u16()?).ok_or_else(|| damaged("flags that there are none of"))?;
        let (groups, places) = (reader.u16()?, reader.u16()?);
        let name = reader.u32()?;
        let (plain, others) = (reader.u64()?, reader.u64()?);
        let model = reader.take(u64::from(name), 1)?;
        let model = str::from_utf8(model).map_err(|_| damaged("the model's name is no text"))?;
        check(i64::from(groups) <= MAX_GROUPS && places <= MAX_PLACES, "more groups than an engine has")?;
        let groups = reader.groups(groups)?;
        let places = reader.places(places)?;
        check(plain == 0 || !places.is_empty(), "blocks that are nowhere")?;
        let (plain, _) = reader.take(plain, PLAIN)?.as_chunks::<PLAIN>();
        check(plain.iter().all(|block| read_plain(block).depth <= DEEPEST), "a chain too long")?;
        reader.needs(others, OTHER)?;
        let others = (0..others).map(|_| reader.other(places.len())).collect::<Result<Vec<_>, _>>()?;
        check(reader.0.is_empty(), "bytes that belong to nothing")?;
        let image = Self { model, head: Head { flags, groups, places }, plain, others };
        image.check_names_and_keys()?;
        Ok(image)
    }

    /// In the order in which they were written.
    pub(crate) fn plain(&self) -> impl ExactSizeIterator<Item = Plain> {
        self.plain.iter().map(read_plain)
    }

    /// Distinct blocks.
    pub(crate) fn blocks(&self) -> u64 {
        (self.plain.len() + self.others.len()) as u64
    }

    fn check_names_and_keys(&self) -> Result<(), ImageError> {
        let mut numbers: Vec<u64> = self.plain().map(|block| block.name).collect();
        let mut keys: Vec<u64> = self.plain().map(|block| block.key.0).collect();
        let mut names = HashSet::new();
        let mut once = true;
        for block in &self.others {
            match &block.name {
                EngineHash::Unsigned(number) => numbers.push(*number),
                name => once &= names.insert(name),
            }
            keys.extend(block.spot.filter(|_| !block.shares_key).map(|(key, _)| key.0));
        }
        numbers.sort_unstable();
        check(once && numbers.is_sorted_by(|one, next| one < next), "a hash twice")?;
        keys.sort_unstable();
        let shared = self.others.iter().filter(|block| block.shares_key).filter_map(|block| block.spot);
        let apart = shared.map(|(key, _)| key.0).all(|key| keys.binary_search(&key).is_err());
        check(apart && keys.is_sorted_by(|one, next| one < next), "a key twice")
    }
}

fn read_plain(bytes: &[u8; PLAIN]) -> Plain {
    let (words, depth) = bytes.as_chunks::<8>();
    let depth = u32::from_le_bytes(depth.try_into().expect("four bytes are left"));
    Plain { key: BlockKey(u64::from_le_bytes(words[0])), name: u64::from_le_bytes(words[1]), depth }
}

/// What is not read yet.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn needs(&self, items: u64, size: usize) -> Result<usize, ImageError> {
        let wanted = items.checked_mul(size as u64).and_then(|wanted| usize::try_from(wanted).ok());
        wanted.filter(|wanted| *wanted <= self.0.len()).ok_or_else(|| damaged("it ends before all is said"))
    }

    fn take(&mut self, items: u64, size: usize) -> Result<&'a [u8], ImageError> {
        let wanted = self.needs(items, size)?;
        let (taken, rest) = self.0.split_at(wanted);
        self.0 = rest;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], ImageError> {
        Ok(self.take(1, N)?.try_into().expect("so many were taken"))
    }

    fn u8(&mut self) -> Result<u8, ImageError> {
        Ok(self.array::<1>()?[0])
    }

    fn u16(&mut self) -> Result<u16, ImageError> {
        self.array().map(u16::from_le_bytes)
    }

    fn u32(&mut self) -> Result<u32, ImageError> {
        self.array().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, ImageError> {
        self.array().map(u64::from_le_bytes)
    }

    fn i64(&mut self) -> Result<i64, ImageError> {
        self.array().map(i64::from_le_bytes)
    }

    fn groups(&mut self, count: u16) -> Result<Vec<GroupImage>, ImageError> {
        self.needs(count.into(), GROUP)?;
        let mut groups: Vec<GroupImage> = Vec::with_capacity(count.into());
        for _ in 0..count {
            let (number, window, block_size) = (self.i64()?, self.i64()?, self.u32()?);
            let (kind, sparse) = (KINDS.get(usize::from(self.u8()?)), self.u8()?);
            let before = groups.last().map_or(-1, |group| group.number);
            check(before < number && number < MAX_GROUPS, "groups out of order")?;
            let Some(kind) = kind.filter(|_| block_size < 1 << 31 && sparse < 2) else {
                return Err(damaged("a group that can't be"));
            };
            groups.push(GroupImage { number, kind: *kind, window, block_size, sparse: sparse == 1 });
        }
        Ok(groups)
    }

    fn places(&mut self, count: u16) -> Result<Vec<(Tier, i64)>, ImageError> {
        self.needs(count.into(), PLACE)?;
        let mut places = Vec::with_capacity(count.into());
        for _ in 0..count {
            let (tier, group) = (Tier::ALL.get(usize::from(self.u8()?)), self.i64()?);
            let tier = tier.filter(|_| (0..MAX_GROUPS).contains(&group));
            places.push((*tier.ok_or_else(|| damaged("a place that can't be"))?, group));
        }
        let distinct: HashSet<_> = places.iter().map(|(tier, group)| (*tier as u8, *group)).collect();
        check(distinct.len() == places.len(), "a place twice")?;
        Ok(places)
    }

    fn other(&mut self, places: usize) -> Result<Other<'a>, ImageError> {
        let form = self.u8()?;
        let count = self.u16()?;
        let (has_key, shares_key) = (form & HAS_KEY != 0, form & SHARES_KEY != 0);
        check(form < 16 && (has_key || !shares_key), "a block of no form")?;
        let name = self.name(form & 3)?;
        let spot = if has_key { Some((BlockKey(self.u64()?), self.u32()?)) } else { None };
        check(spot.is_none_or(|(_, depth)| depth <= DEEPEST), "a chain too long")?;
        self.needs(count.into(), 6)?;
        let mut copies: Vec<(u16, u32, bool)> = Vec::with_capacity(count.into());
        for _ in 0..count {
            let (place, number) = (self.u16()?, self.u32()?);
            let (place, doubt) = (place & !DOUBT, place & DOUBT != 0);
            let ascends = copies.last().is_none_or(|(before, ..)| *before < place);
            check(ascends && usize::from(place) < places && number > 0, "copies that can't be")?;
            copies.push((place, number, doubt));
        }
        check(!copies.is_empty(), "a block that is nowhere")?;
        Ok(Other { name, spot, shares_key, copies })
    }

    fn name(&mut self, kind: u8) -> Result<EngineHash<'a>, ImageError> {
        let no_form = || damaged("a hash of no form");
        match kind {
            0 => Ok(EngineHash::Unsigned(self.u64()?)),
            1 => Some(self.i64()?).filter(|number| *number < 0).map(EngineHash::Negative).ok_or_else(no_form),
            _ => {
                let length = self.u16()?;
                let most = if kind == 2 { EngineHash::MAX_BYTES } else { EngineHash::MAX_TEXT };
                check((1..=most).contains(&usize::from(length)), "a hash of no form")?;
                let raw = self.take(length.into(), 1)?;
                if kind == 2 {
                    return Ok(EngineHash::Bytes(raw.into()));
                }
                str::from_utf8(raw).map(|text| EngineHash::Text(text.into())).map_err(|_| no_form())
            }
        }
    }
}
