//! Kubernetes service accounts: the API server is asked what it thinks of a token (TokenReview), and its answer is
//! believed for a few seconds. A server that cannot be asked makes nobody a stranger: that is 503, not 401.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use futures_util::future::BoxFuture;
use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec, TokenReviewStatus};
use kube::api::{Api, PostParams};
use sha2::{Digest, Sha256};
use tokio::sync::Semaphore;
use tokio::time::{Instant, timeout};

use crate::config::KubernetesSettings;
use crate::mcp::auth::{Identity, Method, Verdict, looks_like_a_jwt};
use crate::money::AgentId;

/// How long an account that was deleted, or a token that was revoked, still gets in.
const KNOWN_FOR: Duration = Duration::from_secs(20);
const REFUSED_FOR: Duration = Duration::from_secs(5);
const MAX_REMEMBERED: usize = 10_000;
/// Questions at once; more wait.
const MAX_ASKING: usize = 16;
const ASK_TIMEOUT: Duration = Duration::from_secs(5);

const SERVICE_ACCOUNT: &str = "system:serviceaccount:";

pub struct TokenReviews {
    api: Api<TokenReview>,
    audiences: Vec<String>,
    /// By the SHA-256 of the token.
    remembered: Mutex<BTreeMap<[u8; 32], (Instant, Verdict)>>,
    asking: Semaphore,
    /// What is wrong with asking, as the log said it last.
    trouble: Mutex<Option<String>>,
}

impl TokenReviews {
    /// Asks nobody yet. `Err` is a sentence for the operator.
    pub fn new(settings: &KubernetesSettings) -> Result<TokenReviews, String> {
        let client = config(settings).and_then(|config| {
            kube::Client::try_from(config).map_err(|error| {
                let error: String = error.to_string().chars().filter(|c| !c.is_control()).take(200).collect();
                format!("the API server's client cannot be set up ({error})")
            })
        });
        Ok(TokenReviews {
            api: Api::all(client?),
            audiences: settings.audiences.clone(),
            remembered: Mutex::default(),
            asking: Semaphore::new(MAX_ASKING),
            trouble: Mutex::default(),
        })
    }

    async fn verdict(&self, token: &str, may_ask: bool) -> Verdict {
        if !looks_like_a_jwt(token) {
            return Verdict::NotMine;
        }
        let digest: [u8; 32] = Sha256::digest(token).into();
        if let Some(verdict) = self.remembered(&digest) {
            return verdict;
        }
        if !may_ask {
            return Verdict::WouldAsk;
        }
        let asked = timeout(ASK_TIMEOUT, async {
            let _place = self.asking.acquire().await;
            // Whoever was before us may have asked about the same token.
            match self.remembered(&digest) {
                Some(verdict) => Ok(verdict),
                None => self.ask(token).await,
            }
        });
        match asked.await {
            Ok(Ok(verdict)) => {
                self.note(None);
                self.remember(digest, &verdict);
                verdict
            }
            Ok(Err(problem)) => {
                self.note(Some(problem));
                Verdict::Unavailable
            }
            Err(_) => {
                self.note(Some("no answer in time".to_owned()));
                Verdict::Unavailable
            }
        }
    }

    /// Says what is wrong, and that it is over, once: while it lasts every request meets it.
    fn note(&self, trouble: Option<String>) {
        let mut last = self.trouble.lock().unwrap_or_else(PoisonError::into_inner);
        match &trouble {
            Some(problem) if trouble != *last => {
                tracing::error!(problem, "the Kubernetes API server could not be asked about a token");
            }
            None if last.is_some() => tracing::info!("the Kubernetes API server answers about tokens again"),
            _ => {}
        }
        *last = trouble;
    }

    /// Whether the API server answers this process: it is asked about a token that nobody has.
    pub async fn probe(&self) -> Result<(), String> {
        let asked = timeout(ASK_TIMEOUT, self.ask("tollway-check")).await;
        asked.map_err(|_| "no answer in time".to_owned())?.map(|_| ())
    }

    /// `Err`: there is no answer. Its text has nothing that the server wrote, which could be the token.
    async fn ask(&self, token: &str) -> Result<Verdict, String> {
        let spec = TokenReviewSpec { token: token.to_owned(), audiences: Some(self.audiences.clone()) };
        let review = TokenReview { spec, ..TokenReview::default() };
        match self.api.create(&PostParams::default(), &review).await {
            Ok(review) => Ok(self.decide(review.status.unwrap_or_default())),
            Err(kube::Error::Api(status)) if matches!(status.code, 401 | 403) => Err(format!(
                "it answers {}: this process needs the right to create tokenreviews (system:auth-delegator)",
                status.code
            )),
            Err(kube::Error::Api(status)) => Err(format!("it answers {}", status.code)),
            Err(kube::Error::SerdeError(_)) => Err("its answer is no TokenReview".to_owned()),
            Err(kube::Error::Auth(_)) => Err("the token that this process is to show cannot be read".to_owned()),
            Err(_) => Err("no connection, or no answer".to_owned()),
        }
    }

    fn decide(&self, status: TokenReviewStatus) -> Verdict {
        if status.authenticated != Some(true) || status.error.is_some_and(|error| !error.is_empty()) {
            return Verdict::Refused("the API server does not know it, or it is for another audience");
        }
        // A server that does not know of audiences would take a token that was made for somebody else.
        if !status.audiences.unwrap_or_default().iter().any(|one| self.audiences.contains(one)) {
            return Verdict::Refused("it is for another audience");
        }
        let name = status.user.and_then(|user| user.username).unwrap_or_default();
        let parts = name.strip_prefix(SERVICE_ACCOUNT).and_then(|rest| rest.split_once(':'));
        match (parts, name.parse::<AgentId>()) {
            (Some((namespace, account)), Ok(agent))
                if !namespace.is_empty() && !account.is_empty() && !account.contains(':') =>
            {
                Verdict::Known(Identity::named(agent))
            }
            (Some(_), Err(_)) => Verdict::Refused("its service account's name is too long for an agent's"),
            _ => Verdict::Refused("it is no service account's"),
        }
    }

    fn remembered(&self, digest: &[u8; 32]) -> Option<Verdict> {
        let remembered = self.remembered.lock().unwrap_or_else(PoisonError::into_inner);
        remembered.get(digest).filter(|(until, _)| Instant::now() < *until).map(|(_, verdict)| verdict.clone())
    }

    fn remember(&self, digest: [u8; 32], verdict: &Verdict) {
        let now = Instant::now();
        let time = if matches!(verdict, Verdict::Known(_)) { KNOWN_FOR } else { REFUSED_FOR };
        let mut remembered = self.remembered.lock().unwrap_or_else(PoisonError::into_inner);
        if remembered.len() >= MAX_REMEMBERED {
            remembered.retain(|_, (until, _)| now < *until);
        }
        if remembered.len() >= MAX_REMEMBERED {
            remembered.retain(|_, (_, verdict)| matches!(verdict, Verdict::Known(_)));
        }
        if remembered.len() < MAX_REMEMBERED {
            // An answer that somebody else got meanwhile lives no longer for being given again.
            remembered
                .entry(digest)
                .and_modify(|old| {
                    if old.0 <= now {
                        *old = (now + time, verdict.clone());
                    }
                })
                .or_insert_with(|| (now + time, verdict.clone()));
        }
    }
}

impl Method for TokenReviews {
    fn name(&self) -> &'static str {
        "kubernetes"
    }

    fn identify<'a>(&'a self, token: &'a str, may_ask: bool) -> BoxFuture<'a, Verdict> {
        Box::pin(self.verdict(token, may_ask))
    }
}

fn config(settings: &KubernetesSettings) -> Result<kube::Config, String> {
    let mut config = match &settings.api_server {
        None => kube::Config::incluster().map_err(|_| {
            "this process does not run in a cluster with a service account: write auth.kubernetes.api_server, or mount \
             the account's token (automountServiceAccountToken)"
                .to_owned()
        })?,
        Some(server) => {
            let url = server.url.as_str().parse().map_err(|_| "api_server is no URL".to_owned())?;
            let mut config = kube::Config::new(url);
            config.root_cert_file = server.ca_file.clone();
            config.auth_info.token_file = server.token_file.as_ref().map(|path| path.display().to_string());
            config
        }
    };
    config.connect_timeout = Some(ASK_TIMEOUT);
    config.read_timeout = Some(ASK_TIMEOUT);
    config.write_timeout = Some(ASK_TIMEOUT);
    config.reset_reader_on_write = true;
    // Whoever waits for the answer decides what comes next.
    config.default_retry = false;
    Ok(config)
}
