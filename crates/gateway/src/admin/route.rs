//! The admin listener's paths.

use actix_web::http::Method;

use crate::errors::EdgeError;

/// A face of the admin listener.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AdminRoute<'a> {
    Live,
    Ready,
    Dashboard,
    OpenApi,
    Metrics,
    Cluster,
    Endpoints,
    AddEndpoint,
    RemoveEndpoint(&'a str),
    DrainEndpoint(&'a str),
    Requests,
    Request(&'a str),
    Session(&'a str),
    Explain,
}

impl<'a> AdminRoute<'a> {
    /// The face at this path (without its query).
    ///
    /// # Errors
    /// When there is none, or not by this method.
    pub(super) fn of(method: &Method, path: &'a str) -> Result<Self, EdgeError> {
        let (reads, adds, removes) = match path {
            "/livez" => (Some(Self::Live), None, None),
            "/readyz" => (Some(Self::Ready), None, None),
            "/" => (Some(Self::Dashboard), None, None),
            "/openapi.json" => (Some(Self::OpenApi), None, None),
            "/metrics" => (Some(Self::Metrics), None, None),
            "/cluster" => (Some(Self::Cluster), None, None),
            "/endpoints" => (Some(Self::Endpoints), Some(Self::AddEndpoint), None),
            "/requests" => (Some(Self::Requests), None, None),
            "/explain" => (None, Some(Self::Explain), None),
            _ => Self::below(path).ok_or_else(|| EdgeError::not_found(path))?,
        };
        let found = match *method {
            Method::GET | Method::HEAD => reads,
            Method::POST => adds,
            Method::DELETE => removes,
            _ => None,
        };
        found.ok_or_else(|| {
            let named = [("GET", reads), ("POST", adds), ("DELETE", removes)];
            let allowed: Vec<_> =
                named.iter().filter(|(_, face)| face.is_some()).map(|(name, _)| *name).collect();
            EdgeError::method_not_allowed(method.as_str(), &allowed.join(", "))
        })
    }

    /// Faces whose path names something.
    fn below(path: &'a str) -> Option<(Option<Self>, Option<Self>, Option<Self>)> {
        let (kind, name) = path.strip_prefix('/')?.split_once('/')?;
        if name.is_empty() {
            return None;
        }
        match kind {
            "requests" => Some((Some(Self::Request(name)), None, None)),
            "sessions" => Some((Some(Self::Session(name)), None, None)),
            "endpoints" => match name.strip_suffix("/drain") {
                Some(id) => Some((None, Some(Self::DrainEndpoint(id)), None)),
                None => Some((None, None, Some(Self::RemoveEndpoint(name)))),
            },
            _ => None,
        }
    }

    /// Whether it is served without a token: probes carry none, and the page asks for one itself.
    pub(super) const fn is_open(&self) -> bool {
        matches!(self, Self::Live | Self::Ready | Self::Dashboard | Self::OpenApi)
    }

    /// Its method and path as the description lists them.
    #[cfg(test)]
    const fn listed(&self) -> (&'static str, &'static str) {
        match self {
            Self::Live => ("get", "/livez"),
            Self::Ready => ("get", "/readyz"),
            Self::Dashboard => ("get", "/"),
            Self::OpenApi => ("get", "/openapi.json"),
            Self::Metrics => ("get", "/metrics"),
            Self::Cluster => ("get", "/cluster"),
            Self::Endpoints => ("get", "/endpoints"),
            Self::AddEndpoint => ("post", "/endpoints"),
            Self::RemoveEndpoint(_) => ("delete", "/endpoints/{id}"),
            Self::DrainEndpoint(_) => ("post", "/endpoints/{id}/drain"),
            Self::Requests => ("get", "/requests"),
            Self::Request(_) => ("get", "/requests/{id}"),
            Self::Session(_) => ("get", "/sessions/{key}"),
            Self::Explain => ("post", "/explain"),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    const PATHS: [&str; 12] = [
        "/livez",
        "/readyz",
        "/",
        "/openapi.json",
        "/metrics",
        "/cluster",
        "/endpoints",
        "/endpoints/00ff",
        "/endpoints/00ff/drain",
        "/requests",
        "/requests/a",
        "/sessions/a/b",
    ];

    /// Every face, found by trying each method on each path.
    fn faces() -> Vec<AdminRoute<'static>> {
        PATHS
            .iter()
            .chain(&["/explain"])
            .flat_map(|path| {
                [Method::GET, Method::POST, Method::DELETE].map(|method| AdminRoute::of(&method, path))
            })
            .flatten()
            .collect()
    }

    #[test]
    fn the_description_lists_exactly_the_routes_there_are() {
        let described: serde_json::Value = serde_json::from_str(super::super::OPENAPI).unwrap();
        let paths = described["paths"].as_object().unwrap();
        let listed: BTreeSet<(String, String)> = paths
            .iter()
            .flat_map(|(path, methods)| {
                let methods = methods.as_object().unwrap().keys().filter(|key| *key != "parameters");
                methods.map(move |method| (method.clone(), path.clone()))
            })
            .collect();
        let there: BTreeSet<(String, String)> = faces()
            .iter()
            .map(|face| {
                let (method, path) = face.listed();
                (method.to_owned(), path.to_owned())
            })
            .collect();
        assert_eq!(listed, there);
        assert_eq!(there.len(), 14, "every variant is reached");
    }

    #[test]
    fn other_paths_and_methods_are_told_apart() {
        let status = |method: Method, path: &str| AdminRoute::of(&method, path).unwrap_err().status.as_u16();
        assert_eq!(status(Method::GET, "/nothing"), 404);
        assert_eq!(status(Method::GET, "/requests/"), 404);
        assert_eq!(status(Method::GET, "/explain"), 405);
        assert_eq!(status(Method::PUT, "/endpoints"), 405);
        assert_eq!(status(Method::POST, "/endpoints/00ff"), 405);
    }
}
