//! What the settings make of splitting.

use crate::ReplicaId;
use crate::decision::Part;
use crate::policy::{PdCostSettings, Plan, PolicyName, SplitMode};
use crate::settings::Settings;
use crate::view::View;

/// How pairs are chosen.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Choosing {
    /// The cheapest pair.
    Cost {
        /// Costs that differ by less than this, in ms, are the same.
        tie_ms: f64,
    },
    /// The pair with the best predicted quality of experience.
    Qoe {
        /// Qualities that differ by less than this are the same.
        tie_qoe: f64,
    },
    /// Each leg by itself.
    Apart,
}

/// How requests are chosen for where endpoints have roles.
pub(crate) struct PdPlan {
    pub(crate) choosing: Choosing,
    pub(crate) mode: SplitMode,
    pub(crate) settings: PdCostSettings,
    /// Of the prefill leg, where legs are chosen apart; its filters always.
    pub(crate) prefill: Plan,
    /// Of the decode leg likewise, and of whole requests.
    pub(crate) decode: Plan,
    name: PolicyName,
}

impl PdPlan {
    pub(crate) fn new(settings: &Settings, own: &ReplicaId) -> Self {
        let tables = &settings.policy_tables;
        let apart = settings.prefill_policy.is_some() || settings.decode_policy.is_some();
        let choosing = match settings.policy {
            _ if apart => Choosing::Apart,
            PolicyName::Cost | PolicyName::PdCost => Choosing::Cost { tie_ms: tables.cost.tie_ms },
            PolicyName::PdQoe => Choosing::Qoe { tie_qoe: tables.pd_qoe.tie_qoe },
            _ => Choosing::Apart,
        };
        let plan = |policy: Option<PolicyName>, part| {
            Plan::new(policy.unwrap_or(settings.policy), part, settings, own)
        };
        Self {
            choosing,
            mode: settings.split,
            settings: tables.pd_cost.clone(),
            prefill: plan(settings.prefill_policy, Part::Prefill),
            decode: plan(settings.decode_policy, Part::Decode),
            name: if settings.policy == PolicyName::Cost { PolicyName::PdCost } else { settings.policy },
        }
    }

    /// The policy that decides on whole requests and decode legs.
    pub(crate) fn name(&self) -> &'static str {
        match self.choosing {
            Choosing::Apart => self.decode.name.as_str(),
            Choosing::Cost { .. } | Choosing::Qoe { .. } => self.name.as_str(),
        }
    }

    /// The policy that decides on prefill legs.
    pub(crate) fn prefill_name(&self) -> &'static str {
        match self.choosing {
            Choosing::Apart => self.prefill.name.as_str(),
            Choosing::Cost { .. } | Choosing::Qoe { .. } => self.name.as_str(),
        }
    }

    pub(crate) fn endpoints_changed(&self, view: &View) {
        self.prefill.endpoints_changed(view);
        self.decode.endpoints_changed(view);
    }
}
