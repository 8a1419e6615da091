//! The operator's configuration: what it looks after, and what it is told once for all.

chassis::config! {
    /// The Kubernetes operator.
    pub struct Config {
        /// Namespaces that are looked after; empty means the operator's own. The environment's
        /// SEALANE_NAMESPACES (commas between) goes first.
        pub namespaces: Vec<String> = Vec::new(),
        /// Whether every namespace is looked after. Needs a ClusterRoleBinding instead of RoleBindings. An
        /// empty SEALANE_NAMESPACES says the same.
        pub cluster_wide: bool = false,
        /// Address of /healthz, /livez, /readyz and /metrics; empty for none.
        pub http_bind: String = "0.0.0.0:9095".to_owned(),
        /// Image of clusters that name none, remembered by each cluster when it is made: a later operator
        /// with another image restarts nothing. The environment's SEALANE_IMAGE goes first.
        pub image: String = "sealane:latest".to_owned(),
        /// Domain of Services in this Kubernetes cluster. If it is wrong, clients reach the bootstrap
        /// address and then nothing else.
        pub cluster_domain: String = "cluster.local".to_owned(),
        /// Name of the Lease that makes one of several operators the one that writes. It is in the
        /// operator's own namespace.
        pub lease_name: String = "sealane-operator".to_owned(),
        /// Namespace of the Lease; empty means the operator's own.
        pub lease_namespace: String = String::new(),
        /// Seconds after which a silent holder of the Lease is followed by another operator.
        pub lease_seconds: u32 = 15,
        /// Seconds between two looks at an object when nothing happens.
        pub resync_seconds: u32 = 30,
        /// Seconds without any sign of life from a watch, while others live, after which /livez is red. A connection to
        /// the API server on which nothing comes for two thirds of it (at least 75 s: each watch hears something every
        /// minute) is given up and made anew.
        pub watch_silence_seconds: u32 = 180,
        /// Address where operators of other regions redeem the tokens of LinkGrants; empty for none.
        pub join_bind: String = "0.0.0.0:9443".to_owned(),
        /// HOST:PORT that those operators are told; found from `join_service` when empty.
        pub join_advertised: String = String::new(),
        /// Service of this operator, in its own namespace, by which they reach it. A NodePort is told with the
        /// address in the environment's HOST_IP.
        pub join_service: String = "sealane-join".to_owned(),
        /// Reconciliations of one kind of object at the same time.
        pub concurrency: u16 = 8,
    }
}

impl Config {
    /// What the environment says goes before the file.
    pub fn with_environment(mut self, variable: impl Fn(&str) -> Option<String>) -> Config {
        if let Some(list) = variable("SEALANE_NAMESPACES") {
            let named = list.split(',').map(str::trim).filter(|name| !name.is_empty());
            self.namespaces = named.map(str::to_owned).collect();
            self.cluster_wide = self.namespaces.is_empty();
        }
        if let Some(image) = variable("SEALANE_IMAGE").filter(|image| !image.is_empty()) {
            self.image = image;
        }
        self
    }
}
