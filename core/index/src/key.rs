//! Block keys: our own names for blocks, the same for every engine that holds the same content.
//!
//! A key is XXH3-64 over a block's tokens, seeded with the parent's key; extra keys, where a block has some, are hashed
//! over that in a domain of their own, so that no extra key can pass for a further block's tokens. The root of a chain
//! is made from the context (model, adapter, block size). Nothing here depends on an engine's own hashes.

use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

use crate::event::{Adapter, ExtraKey};

/// Tells the hash of a block's extra keys from that of a child block.
const EXTRA_DOMAIN: u64 = 0x6578_7472_6120_6b65;

/// The name of a block: its content and all that comes before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct BlockKey(pub(crate) u64);

impl BlockKey {
    /// What the first block of a context has in a parent's place.
    #[must_use]
    pub fn root(model: &str, adapter: &Adapter<'_>, block_size: u32) -> Self {
        let number;
        let (kind, name) = match adapter {
            Adapter::None => (b'-', &b""[..]),
            Adapter::Named(name) => (b'@', name.as_bytes()),
            Adapter::Hidden(id) => {
                number = id.to_le_bytes();
                (b'#', &number[..])
            }
        };
        let mut context = Vec::with_capacity(model.len() + name.len() + 21);
        for text in [model.as_bytes(), name] {
            context.extend_from_slice(&(text.len() as u64).to_le_bytes());
            context.extend_from_slice(text);
        }
        context.push(kind);
        context.extend_from_slice(&block_size.to_le_bytes());
        Self(xxh3_64(&context))
    }

    /// The key of a block that follows this one.
    #[must_use]
    pub fn child(self, tokens: &[u32], extra: &[ExtraKey<'_>]) -> Self {
        let plain = xxh3_64_with_seed(bytemuck::cast_slice(tokens), self.0);
        if extra.is_empty() {
            return Self(plain);
        }
        Self(xxh3_64_with_seed(&canonical(extra), plain ^ EXTRA_DOMAIN))
    }

    /// Of a root: what a block of this context without extra keys holds, apart from what stands before it.
    #[must_use]
    pub fn content(self, tokens: &[u32]) -> Self {
        self.child(tokens, &[])
    }
}

/// Tag, length, content of each, ordered by kind (images keep their order): no two different lists give the same bytes.
fn canonical(extra: &[ExtraKey<'_>]) -> Vec<u8> {
    let rank = |key: &ExtraKey<'_>| match key {
        ExtraKey::Image(..) => 0,
        ExtraKey::Salt(_) => 1,
        ExtraKey::Embeds(_) => 2,
        ExtraKey::Opaque(_) => 3,
    };
    let mut ordered: Vec<_> = extra.iter().collect();
    ordered.sort_by_key(|key| rank(key));
    let mut bytes = Vec::new();
    for key in ordered {
        bytes.push(rank(key));
        let body = match key {
            ExtraKey::Image(identifier, offset) => {
                bytes.push(u8::from(offset.is_some()));
                bytes.extend_from_slice(&offset.unwrap_or(0).to_le_bytes());
                identifier.as_bytes()
            }
            ExtraKey::Salt(value) => value.as_bytes(),
            ExtraKey::Embeds(raw) | ExtraKey::Opaque(raw) => raw,
        };
        bytes.extend_from_slice(&(body.len() as u64).to_le_bytes());
        bytes.extend_from_slice(body);
    }
    bytes
}

/// The keys of one prompt in one context, computed as far as somebody asks, each once.
#[derive(Debug)]
pub struct KeyChain<'a> {
    keys: Vec<BlockKey>,
    root: BlockKey,
    tokens: &'a [u32],
    block_size: usize,
    extra: &'a [Vec<ExtraKey<'a>>],
}

impl<'a> KeyChain<'a> {
    /// `extra` gives a block's extra keys by its number; blocks beyond its end have none.
    #[must_use]
    pub fn new(root: BlockKey, tokens: &'a [u32], block_size: u32, extra: &'a [Vec<ExtraKey<'a>>]) -> Self {
        Self { keys: Vec::new(), root, tokens, block_size: block_size as usize, extra }
    }

    /// The tokens of block `i`, if the prompt has all of them.
    fn tokens(&self, i: usize) -> Option<&'a [u32]> {
        let end = i.checked_add(1)?.checked_mul(self.block_size)?;
        self.tokens.get(end - self.block_size..end)
    }

    /// What block `i` holds, whatever stands before it; `None` where the prompt has not all of it.
    #[must_use]
    pub fn content(&self, i: usize) -> Option<BlockKey> {
        self.tokens(i).map(|tokens| self.root.content(tokens))
    }

    /// The key of block `i`, which must lie within the prompt.
    #[inline]
    pub fn key(&mut self, i: usize) -> BlockKey {
        match self.keys.get(i) {
            Some(key) => *key,
            None => self.compute_to(i),
        }
    }

    #[cold]
    fn compute_to(&mut self, i: usize) -> BlockKey {
        let mut key = self.keys.last().copied().unwrap_or(self.root);
        for at in self.keys.len()..=i {
            let tokens = self.tokens(at).expect("a block of the prompt");
            key = key.child(tokens, self.extra.get(at).map_or(&[][..], Vec::as_slice));
            self.keys.push(key);
        }
        key
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn root() -> BlockKey {
        BlockKey::root("model", &Adapter::None, 2)
    }

    fn salt(value: &str) -> ExtraKey<'_> {
        ExtraKey::Salt(value.into())
    }

    #[test]
    fn every_part_of_a_context_counts() {
        let named = |name: &'static str| Adapter::Named(name.into());
        let roots = [
            root(),
            BlockKey::root("model", &Adapter::None, 4),
            BlockKey::root("mode", &named("l"), 2),
            BlockKey::root("model", &named(""), 2),
            BlockKey::root("model", &named("1"), 2),
            BlockKey::root("model", &Adapter::Hidden(1), 2),
            BlockKey::root("model", &Adapter::Hidden(0x31), 2),
            BlockKey::root("", &named("model"), 2),
        ];
        for (at, one) in roots.iter().enumerate() {
            assert!(!roots[..at].contains(one), "{at}");
        }
    }

    #[test]
    fn kinds_of_extra_keys_never_meet() {
        let lists = [
            vec![],
            vec![salt("x")],
            vec![salt("xx")],
            vec![salt("x"), salt("x")],
            vec![ExtraKey::Image("x".into(), None)],
            vec![ExtraKey::Image("x".into(), Some(0))],
            vec![ExtraKey::Image("x".into(), Some(-1))],
            vec![ExtraKey::Embeds(b"x"[..].into())],
            vec![ExtraKey::Opaque(b"x"[..].into())],
            vec![ExtraKey::Image("x".into(), None), ExtraKey::Image("y".into(), None)],
            vec![ExtraKey::Image("y".into(), None), ExtraKey::Image("x".into(), None)],
        ];
        let keys: Vec<_> = lists.iter().map(|extra| root().child(&[1, 2], extra)).collect();
        for (at, one) in keys.iter().enumerate() {
            assert!(!keys[..at].contains(one), "{:?}", lists[at]);
        }
    }

    #[test]
    fn the_order_of_kinds_does_not_count() {
        let image = ExtraKey::Image("i".into(), Some(3));
        let one = root().child(&[1, 2], &[salt("s"), image.clone()]);
        assert_eq!(one, root().child(&[1, 2], &[image, salt("s")]));
    }

    #[test]
    fn extra_keys_do_not_pass_for_a_further_block() {
        let bytes = canonical(&[salt("abc")]);
        let (chunks, rest) = bytes.as_chunks();
        assert!(rest.is_empty(), "as long as a block of tokens would be");
        let tokens: Vec<u32> = chunks.iter().map(|chunk| u32::from_ne_bytes(*chunk)).collect();
        let (block, further) = (root().child(&[1, 2], &[salt("abc")]), root().child(&[1, 2], &[]).child(&tokens, &[]));
        assert_ne!(block, further);
    }

    #[test]
    fn a_chain_computes_what_single_steps_do() {
        let tokens: Vec<u32> = (0..7).collect();
        let extra = [vec![], vec![salt("s")]];
        let mut chain = KeyChain::new(root(), &tokens, 2, &extra);
        let first = root().child(&[0, 1], &[]);
        let second = first.child(&[2, 3], &extra[1]);
        assert_eq!(chain.key(2), second.child(&[4, 5], &[]));
        assert_eq!((chain.key(0), chain.key(1)), (first, second));
    }
}
