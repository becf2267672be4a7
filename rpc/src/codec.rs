//! The codec of all calls: Protocol Buffers with small buffers. An event of a response has some 40 bytes, a gateway and an
//! engine have a thousand responses at once, and tonic's own codec reserves 8 KiB for each of them, on both sides.

use std::marker::PhantomData;

use prost::Message;
use tonic::codec::{BufferSettings, Codec};
use tonic_prost::{ProstCodec, ProstDecoder, ProstEncoder};

/// What a call's buffer has at first, and grows by, in bytes.
const BUFFER_BYTES: usize = 1024;
/// Above so many bytes what is encoded is sent before more is.
const YIELD_BYTES: usize = 32 * 1024;

/// Encodes messages of type `T` and decodes messages of type `U`.
#[derive(Clone, Debug)]
pub struct MessageCodec<T, U>(PhantomData<(T, U)>);

impl<T, U> Default for MessageCodec<T, U> {
    fn default() -> Self {
        Self(PhantomData)
    }
}

impl<T, U> Codec for MessageCodec<T, U>
where
    T: Message + Send + 'static,
    U: Message + Default + Send + 'static,
{
    type Encode = T;
    type Decode = U;
    type Encoder = ProstEncoder<T>;
    type Decoder = ProstDecoder<U>;

    fn encoder(&mut self) -> Self::Encoder {
        ProstCodec::<T, U>::raw_encoder(BufferSettings::new(BUFFER_BYTES, YIELD_BYTES))
    }

    fn decoder(&mut self) -> Self::Decoder {
        ProstCodec::<T, U>::raw_decoder(BufferSettings::new(BUFFER_BYTES, YIELD_BYTES))
    }
}
