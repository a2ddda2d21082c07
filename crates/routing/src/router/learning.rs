//! Learning from what requests measured.

use super::Router;
use crate::request::RequestShape;
use crate::{EndpointId, Moment};

/// What one request, served to its end, showed of its endpoint.
#[derive(Clone, Debug, PartialEq)]
pub struct Measurement {
    /// Where it was served.
    pub endpoint: EndpointId,
    /// From dispatch to the first byte of the body, in ms; `None` if it did not stream.
    pub ttft_ms: Option<f64>,
    /// From the first byte to the last, in ms; `None` if it did not stream.
    pub decode_ms: Option<f64>,
    /// From dispatch to the last byte, in ms.
    pub total_ms: f64,
    /// Prompt tokens by the engine's `usage`.
    pub prompt_tokens: Option<u32>,
    /// Of those, how many came from its cache, if it says so.
    pub cached_tokens: Option<u32>,
    /// Output tokens by the engine's `usage`, else the chunks counted.
    pub output_tokens: Option<u32>,
    /// Requests in flight at the endpoint, through all replicas, when it was dispatched, itself excluded.
    pub running_at_dispatch: u32,
}

impl Router {
    /// Takes in what a request measured: corrects what is believed warm.
    pub fn learn(&self, measured: &Measurement, shape: &RequestShape, _now: Moment) {
        let view = self.view();
        let Some(endpoint) = view.get(measured.endpoint) else { return };
        let (Some(cached), Some(prompt)) = (measured.cached_tokens, measured.prompt_tokens) else { return };
        let _ = (endpoint, cached, prompt, shape);
    }
}
