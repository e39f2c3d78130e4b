//! What an engine says about its cache, borrowed from the payload where it can be.
//!
//! Engine hashes are opaque names: never predicted, never compared with our keys. What could not be read keeps its
//! place in the stream as a [`Event::Skipped`], because it may have been a removal.

use std::borrow::Cow;
use std::hash::{Hash, Hasher};

use crate::hits::Kind;

/// An engine's own name for a block. Numbers, bytes and text never equal each other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EngineHash<'a> {
    /// An integer of 0 or more.
    Unsigned(u64),
    /// An integer below 0 (vLLM up to 0.10).
    Negative(i64),
    /// 1 to 64 bytes.
    Bytes(Cow<'a, [u8]>),
    /// 1 to 256 bytes of UTF-8.
    Text(Cow<'a, str>),
}

impl EngineHash<'_> {
    /// The longest hash made of bytes.
    pub const MAX_BYTES: usize = 64;
    /// The longest hash made of text, in bytes.
    pub const MAX_TEXT: usize = 256;

    /// The same, borrowed.
    pub(crate) fn borrowed(&self) -> EngineHash<'_> {
        match self {
            Self::Unsigned(value) => EngineHash::Unsigned(*value),
            Self::Negative(value) => EngineHash::Negative(*value),
            Self::Bytes(bytes) => EngineHash::Bytes(Cow::Borrowed(bytes)),
            Self::Text(text) => EngineHash::Text(Cow::Borrowed(text)),
        }
    }

    /// A copy that borrows nothing.
    #[must_use]
    pub fn to_owned_hash(&self) -> EngineHash<'static> {
        match self {
            Self::Unsigned(value) => EngineHash::Unsigned(*value),
            Self::Negative(value) => EngineHash::Negative(*value),
            Self::Bytes(bytes) => EngineHash::Bytes(Cow::Owned(bytes.to_vec())),
            Self::Text(text) => EngineHash::Text(Cow::Owned(text.to_string())),
        }
    }
}

impl EngineHash<'_> {
    /// What it has beyond a number.
    pub(crate) fn content(&self) -> &[u8] {
        match self {
            Self::Unsigned(_) | Self::Negative(_) => &[],
            Self::Bytes(bytes) => bytes,
            Self::Text(text) => text.as_bytes(),
        }
    }
}

// By hand, for speed: the derived one also hashes the variant. Equal values of two variants may share a bucket.
impl Hash for EngineHash<'_> {
    fn hash<H: Hasher>(&self, state: &mut H) {
        match self {
            Self::Unsigned(value) => state.write_u64(*value),
            Self::Negative(value) => state.write_i64(*value),
            Self::Bytes(bytes) => state.write(bytes),
            Self::Text(text) => state.write(text.as_bytes()),
        }
    }
}

/// What besides parent and tokens tells two blocks apart. The adapter is not among them: it is part of the context.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ExtraKey<'a> {
    /// An image or another item: its identifier, and its offset from the block's first token.
    Image(Cow<'a, str>, Option<i128>),
    /// A request's cache salt.
    Salt(Cow<'a, str>),
    /// A digest of prompt embeddings.
    Embeds(Cow<'a, [u8]>),
    /// A kind that this version doesn't know: keeps blocks apart, matches no request.
    Opaque(Cow<'a, [u8]>),
}

impl ExtraKey<'_> {
    fn content(&self) -> &[u8] {
        match self {
            Self::Image(text, _) | Self::Salt(text) => text.as_bytes(),
            Self::Embeds(raw) | Self::Opaque(raw) => raw,
        }
    }

    /// A copy that borrows nothing.
    #[must_use]
    pub fn to_owned_key(&self) -> ExtraKey<'static> {
        match self {
            Self::Image(identifier, offset) => ExtraKey::Image(Cow::Owned(identifier.to_string()), *offset),
            Self::Salt(value) => ExtraKey::Salt(Cow::Owned(value.to_string())),
            Self::Embeds(digest) => ExtraKey::Embeds(Cow::Owned(digest.to_vec())),
            Self::Opaque(raw) => ExtraKey::Opaque(Cow::Owned(raw.to_vec())),
        }
    }
}

/// Whose weights computed a block.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Adapter<'a> {
    /// The model's own.
    None,
    /// An adapter's, by name.
    Named(Cow<'a, str>),
    /// An adapter's that the dialect gives by number only: a context that no request can name.
    Hidden(i64),
}

impl<'a> Adapter<'a> {
    /// From the two fields of the wire; `id` is −1 where there is none.
    #[must_use]
    pub fn new(name: Option<Cow<'a, str>>, id: i64) -> Self {
        match name {
            Some(name) => Self::Named(name),
            None if id < 0 => Self::None,
            None => Self::Hidden(id),
        }
    }

    /// A copy that borrows nothing.
    #[must_use]
    pub fn to_owned_adapter(&self) -> Adapter<'static> {
        match self {
            Self::None => Adapter::None,
            Self::Named(name) => Adapter::Named(Cow::Owned(name.to_string())),
            Self::Hidden(id) => Adapter::Hidden(*id),
        }
    }
}

/// Where a block lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Tier {
    /// The engine's own cache.
    Gpu,
    /// The host's memory.
    Cpu,
    /// Anything slower.
    Storage,
}

impl Tier {
    /// All tiers, best first; also the order of [`Match::by_tier`](crate::Match::by_tier).
    pub const ALL: [Self; 3] = [Self::Gpu, Self::Cpu, Self::Storage];

    /// The tier's name.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Self::Gpu => "gpu",
            Self::Cpu => "cpu",
            Self::Storage => "storage",
        }
    }

    /// The tier that a medium means, in any letter case. No medium (vLLM < 0.10.2) means GPU.
    #[must_use]
    pub fn of_medium(medium: Option<&str>) -> Option<Self> {
        let Some(medium) = medium else {
            return Some(Self::Gpu);
        };
        if medium == "GPU" {
            return Some(Self::Gpu); // what nearly all say
        }
        match folded(medium)?.as_str() {
            "gpu" => Some(Self::Gpu),
            "cpu" => Some(Self::Cpu),
            "storage" | "fs" | "obj" | "disk" => Some(Self::Storage),
            _ => None,
        }
    }
}

/// The text with case folded, where that gives ASCII; `None` where it can't be the name of a tier.
///
/// Python folds by Unicode's full case folding, where long s, the Kelvin sign and the st ligatures are ASCII letters.
fn folded(text: &str) -> Option<String> {
    const LONGEST: usize = "storage".len();
    let mut folded = String::new();
    for char in text.chars() {
        match char {
            '\u{17f}' => folded.push('s'),
            '\u{212a}' => folded.push('k'),
            '\u{fb05}' | '\u{fb06}' => folded.push_str("st"),
            _ if char.is_ascii() => folded.push(char.to_ascii_lowercase()),
            _ => return None,
        }
        if folded.len() > LONGEST {
            return None;
        }
    }
    Some(folded)
}

/// A run of blocks to be given keys: all that placing a store needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Run<'a> {
    /// The blocks' names, in the order of their tokens.
    pub hashes: Vec<EngineHash<'a>>,
    /// The block before the first one; `None` at the start of a prompt.
    pub parent: Option<EngineHash<'a>>,
    /// The tokens of all blocks.
    pub tokens: Vec<u32>,
    /// Tokens per block; 0 where the event gives none.
    pub block_size: u32,
    /// Whose weights.
    pub adapter: Adapter<'a>,
    /// One list per block, or none at all where no block has any; `None` when the event carries none (they may be hidden).
    pub extra_keys: Option<Vec<Vec<ExtraKey<'a>>>>,
}

impl Run<'_> {
    /// Every block has its tokens and no token is left over.
    #[must_use]
    pub fn is_dense(&self) -> bool {
        self.block_size > 0 && self.tokens.len() as u64 == u64::from(self.block_size) * self.hashes.len() as u64
    }

    /// Tokens and extra keys of each block of a dense run; one that shows no extra keys has none.
    pub fn blocks(&self) -> impl Iterator<Item = (&[u32], &[ExtraKey<'_>])> {
        let extra =
            |at: usize| self.extra_keys.as_ref().and_then(|blocks| blocks.get(at)).map_or(&[][..], Vec::as_slice);
        self.tokens.chunks_exact(self.block_size as usize).enumerate().map(move |(at, tokens)| (tokens, extra(at)))
    }

    /// What it counts for against the limit of parked bytes: its tokens, hashes and extra keys, and the adapter's name.
    #[must_use]
    pub fn size(&self) -> usize {
        let hashes: usize = self.hashes.iter().map(|hash| 16 + hash.content().len()).sum();
        let keys = self.extra_keys.iter().flatten().flatten();
        let adapter = match &self.adapter {
            Adapter::Named(name) => name.len(),
            Adapter::None | Adapter::Hidden(_) => 0,
        };
        self.tokens.len() * 4 + hashes + keys.map(|key| 64 + key.content().len()).sum::<usize>() + adapter
    }

    /// A copy that borrows nothing.
    #[must_use]
    pub fn to_owned_run(&self) -> Run<'static> {
        Run {
            hashes: self.hashes.iter().map(EngineHash::to_owned_hash).collect(),
            parent: self.parent.as_ref().map(EngineHash::to_owned_hash),
            tokens: self.tokens.clone(),
            block_size: self.block_size,
            adapter: self.adapter.to_owned_adapter(),
            extra_keys: self
                .extra_keys
                .as_ref()
                .map(|blocks| blocks.iter().map(|keys| keys.iter().map(ExtraKey::to_owned_key).collect()).collect()),
        }
    }
}

/// Blocks entered a cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stored<'a> {
    /// Which blocks.
    pub run: Run<'a>,
    /// Where; `None` for a medium that this version doesn't know.
    pub tier: Option<Tier>,
    /// The KV-cache group (0 where the dialect gives none), below [`MAX_GROUPS`](crate::wire::MAX_GROUPS).
    pub group: i64,
    /// The group's kind, where the event says it.
    pub kind: Option<Kind>,
    /// The group's attention window in tokens, where the event says it.
    pub window: Option<i64>,
}

/// One physical copy of each named block left a cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Removed<'a> {
    /// Which blocks.
    pub hashes: Vec<EngineHash<'a>>,
    /// Where from; `None` for a medium that this version doesn't know.
    pub tier: Option<Tier>,
    /// The KV-cache group; `None`: every group of the tier.
    pub group: Option<i64>,
    /// Copies left per hash, where an engine says so.
    pub remaining: Option<Vec<u32>>,
}

/// Why an event could not be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SkipReason {
    /// A kind of event that this version doesn't know.
    UnknownTag,
    /// No readable kind at all.
    NoTag,
    /// Neither array nor map.
    NotAnEvent,
    /// The hashes are missing.
    MissingField,
    /// A field of the wrong type.
    WrongType,
    /// A hash of the wrong type or length.
    BadHash,
    /// A token that is no unsigned 32-bit integer.
    BadToken,
    /// A block size below 0 or above 2³¹ − 1.
    BadBlockSize,
    /// A group below 0 or above 255.
    BadGroup,
}

impl SkipReason {
    /// All reasons.
    pub const ALL: [Self; 9] = [
        Self::UnknownTag,
        Self::NoTag,
        Self::NotAnEvent,
        Self::MissingField,
        Self::WrongType,
        Self::BadHash,
        Self::BadToken,
        Self::BadBlockSize,
        Self::BadGroup,
    ];

    /// The short word for it.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Self::UnknownTag => "unknown_tag",
            Self::NoTag => "no_tag",
            Self::NotAnEvent => "not_an_event",
            Self::MissingField => "missing_field",
            Self::WrongType => "wrong_type",
            Self::BadHash => "bad_hash",
            Self::BadToken => "bad_token",
            Self::BadBlockSize => "bad_block_size",
            Self::BadGroup => "bad_group",
        }
    }
}

/// One event, or the place where one could not be read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event<'a> {
    /// See [`Stored`].
    Stored(Stored<'a>),
    /// See [`Removed`].
    Removed(Removed<'a>),
    /// The engine emptied its cache. It does not say which tier: read as every tier.
    Cleared,
    /// What could not be read.
    Skipped {
        /// Why not.
        reason: SkipReason,
        /// Blocks may have left the cache by it.
        may_remove: bool,
    },
}

impl<'a> Event<'a> {
    /// The blocks that it names.
    #[must_use]
    pub fn hashes(&self) -> &[EngineHash<'a>] {
        match self {
            Self::Stored(stored) => &stored.run.hashes,
            Self::Removed(removed) => &removed.hashes,
            Self::Cleared | Self::Skipped { .. } => &[],
        }
    }
}
