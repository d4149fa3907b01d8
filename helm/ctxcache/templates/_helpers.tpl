{{- define "ctxcache.name" -}}
{{ default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- define "ctxcache.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{ .Values.fullnameOverride | trunc 52 | trimSuffix "-" }}
{{- else if contains (include "ctxcache.name" .) .Release.Name -}}
{{ .Release.Name | trunc 52 | trimSuffix "-" }}
{{- else -}}
{{ printf "%s-%s" .Release.Name (include "ctxcache.name" .) | trunc 52 | trimSuffix "-" }}
{{- end -}}
{{- end }}

{{- define "ctxcache.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/part-of: ctxcache
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Never changes between versions: selectors are immutable. */}}
{{- define "ctxcache.storeSelector" -}}
app.kubernetes.io/name: {{ include "ctxcache.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: store
{{- end }}

{{- define "ctxcache.workerSelector" -}}
app.kubernetes.io/name: {{ include "ctxcache.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: worker
{{- end }}

{{- define "ctxcache.testSelector" -}}
app.kubernetes.io/name: {{ include "ctxcache.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: test
{{- end }}

{{- define "ctxcache.backupSelector" -}}
app.kubernetes.io/name: {{ include "ctxcache.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: backup
{{- end }}

{{- define "ctxcache.image" -}}
{{- $name := .Values.image.repository -}}
{{- with .Values.image.registry }}{{ $name = printf "%s/%s" . $name }}{{ end -}}
{{- if .Values.image.digest -}}
{{ $name }}@{{ .Values.image.digest }}
{{- else -}}
{{ $name }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}
{{- end }}

{{- define "ctxcache.workerImage" -}}
{{- if .Values.worker.image -}}
{{ .Values.worker.image }}
{{- else if .Values.image.digest -}}
{{ fail "worker.image is needed where image.digest is set: the worker's image is another one" }}
{{- else -}}
{{ include "ctxcache.image" . }}-worker
{{- end -}}
{{- end }}

{{- define "ctxcache.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{ .Values.serviceAccount.name | default (include "ctxcache.fullname" .) }}
{{- else -}}
{{ .Values.serviceAccount.name | default "default" }}
{{- end -}}
{{- end }}

{{- define "ctxcache.tlsSecretName" -}}
{{- if eq .Values.tls.mode "secret" -}}
{{ required "tls.secretName is needed where tls.mode is secret" .Values.tls.secretName }}
{{- else -}}
{{ include "ctxcache.fullname" . }}-tls
{{- end -}}
{{- end }}

{{/* Directories below the mounts: the store makes them for itself alone, whatever mode a volume has. */}}
{{- define "ctxcache.settings" -}}
{{- $own := dict
  "data_directory" "/var/lib/ctxcache/store"
  "listen" (printf "0.0.0.0:%v" .Values.service.port)
  "bulk_listen" (printf "0.0.0.0:%v" .Values.service.bulkPort)
  "metrics_listen" (printf "0.0.0.0:%v" .Values.metrics.port)
  "unix_socket" "/run/ctxcache/ctxcache.sock"
  "control_socket" "/run/ctxcache/control.sock"
  "arena_directory" "/dev/shm"
  "arena_size_bytes" (printf "%dMiB" (int64 .Values.store.arena.sizeMiB))
  "arena_huge_pages" (ternary "on" "off" .Values.store.arena.hugePages)
-}}
{{- if .Values.auth.tokenHashesSecret }}{{ $_ := set $own "token_hashes" "/etc/ctxcache-tokens/hashes" }}{{ end -}}
{{- if .Values.metrics.tokenSecret }}{{ $_ := set $own "metrics_token_file" "/etc/ctxcache-metrics-token/token" }}{{ end -}}
{{- if .Values.metrics.tls.enabled }}
{{- $place := ternary "/etc/ctxcache-metrics-tls" "/etc/ctxcache-tls" (ne .Values.metrics.tls.secretName "") -}}
{{- $_ := set $own "metrics_tls_certificate" (printf "%s/tls.crt" $place) -}}
{{- $_ := set $own "metrics_tls_key" (printf "%s/tls.key" $place) -}}
{{- end -}}
{{- with .Values.store.ssdFileSize }}{{ $_ := set $own "ssd_size_bytes" . }}{{ end -}}
{{- if .Values.store.ssd -}}
{{- $directories := list -}}
{{- range .Values.store.ssd }}{{ $directories = append $directories (printf "/var/lib/ctxcache-ssd/%s/store" .name) }}{{ end -}}
{{- $_ := set $own "ssd_directories" $directories -}}
{{- end -}}
{{- if eq .Values.tls.mode "none" -}}
{{- $_ := set $own "insecure_listen" true -}}
{{- else -}}
{{- $_ := set $own "tls_certificate" "/etc/ctxcache-tls/tls.crt" -}}
{{- $_ := set $own "tls_key" "/etc/ctxcache-tls/tls.key" -}}
{{- if .Values.tls.requireClientCertificate }}{{ $_ := set $own "tls_client_ca" "/etc/ctxcache-tls/ca.crt" }}{{ end -}}
{{- end -}}
{{- $fleet := .Values.store.fleet -}}
{{- if $fleet.bucket -}}
{{- $_ := set $own "fleet_bucket" $fleet.bucket -}}
{{- $_ := set $own "fleet_secret_file" "/etc/ctxcache-fleet/secret" -}}
{{- if $fleet.tokenSecret }}{{ $_ := set $own "fleet_token_file" "/etc/ctxcache-fleet-token/token" }}{{ end -}}
{{- if ne .Values.tls.mode "none" }}{{ $_ := set $own "fleet_server_name" (include "ctxcache.fleetServerName" .) }}{{ end -}}
{{- end -}}
{{- range $name, $_ := .Values.store.settings -}}
{{- if hasKey $own $name }}{{ fail (printf "store.settings.%s is set by the chart: see its other values" $name) }}{{ end -}}
{{- end -}}
{{- if and $fleet.bucket (ne .Values.tls.mode "none") (include "ctxcache.tellsApart" .) -}}
{{- $subject := printf "dns:%s" (include "ctxcache.fleetServerName" .) -}}
{{- $others := get .Values.store.settings "identities" | default list -}}
{{- if kindIs "string" $others -}}
{{- $_ := set $own "identities" (printf "%s=fleet:peer,%s" $subject $others) -}}
{{- else -}}
{{- $_ := set $own "identities" (prepend $others (dict "subject" $subject "tenant" "fleet" "role" "peer")) -}}
{{- end -}}
{{- end -}}
{{ merge $own .Values.store.settings | toToml }}
{{- end }}

{{/* Whether the store asks who calls; empty where everybody may do everything. */}}
{{- define "ctxcache.tellsApart" -}}
{{- if or .Values.auth.tokenHashesSecret (get .Values.store.settings "identities") }}yes{{ end -}}
{{- end }}

{{- define "ctxcache.fleetServerName" -}}
{{ .Values.store.fleet.serverName | default (printf "%s.%s.svc" (include "ctxcache.fullname" .) .Release.Namespace) }}
{{- end }}

{{- define "ctxcache.fleetSecretName" -}}
{{ .Values.store.fleet.secretName | default (printf "%s-fleet" (include "ctxcache.fullname" .)) }}
{{- end }}

{{/* Where the bucket answers, as far as its URL tells. */}}
{{- define "ctxcache.bucketPort" -}}
{{- $endpoint := urlParse .Values.store.fleet.endpoint -}}
{{ regexFind ":[0-9]+$" $endpoint.host | trimPrefix ":" | default (ternary "80" "443" (eq $endpoint.scheme "http")) }}
{{- end }}

{{/* Seconds from the signal to the end: what is served out, drained, flushed, and a margin. */}}
{{- define "ctxcache.graceSeconds" -}}
{{- $drain := get .Values.store.settings "drain_timeout_s" | default 30 | int -}}
{{- $flush := get .Values.store.settings "flush_timeout_s" | default 120 | int -}}
{{ add .Values.store.preStopSleepSeconds $drain $flush 15 }}
{{- end }}

{{/* What cannot be is refused here, by every render. */}}
{{- define "ctxcache.check" -}}
{{- $store := .Values.store -}}
{{- $isSet := eq $store.kind "StatefulSet" -}}
{{- if and $isSet (gt (int $store.replicas) 1) -}}
{{- if not (or $store.fleet.bucket $store.clientsChooseTheirStore) }}{{ fail "store.replicas above 1: without a bucket stores share nothing, and a returning session would be missed without a word. Set store.fleet.bucket: a fleet's sessions go on at whichever store a turn lands (docs/fleet.md). Or set store.clientsChooseTheirStore where each client sends a session to the same store each time, by that store's own name" }}{{ end -}}
{{- if $store.data.existingClaim }}{{ fail "store.data.existingClaim is of one store: store.replicas is above 1" }}{{ end -}}
{{- if and .Values.worker.enabled (not .Values.worker.storeTarget) (not $store.shareWithNode.enabled) }}{{ fail "worker.storeTarget is needed where store.replicas is above 1: there is no common address" }}{{ end -}}
{{- end -}}
{{- if and (not $isSet) $store.data.existingClaim }}{{ fail "store.data.existingClaim is of a StatefulSet: a DaemonSet has store.data.hostPath" }}{{ end -}}
{{- include "ctxcache.checkFleet" . -}}
{{- if and (eq .Values.service.type "LoadBalancer") (eq .Values.tls.mode "none") (not .Values.service.loadBalancerSourceRanges) }}{{ fail "service.type LoadBalancer without TLS gives every session to whoever reaches it: set tls.mode, or service.loadBalancerSourceRanges" }}{{ end -}}
{{- if and .Values.metrics.tls.enabled (not .Values.metrics.tls.secretName) (eq .Values.tls.mode "none") }}{{ fail "metrics.tls needs a certificate: set metrics.tls.secretName, or tls.mode" }}{{ end -}}
{{- if and .Values.networkPolicy.enabled (not .Values.networkPolicy.metricsFrom) (or .Values.metrics.serviceMonitor.enabled .Values.metrics.podMonitor.enabled) }}{{ fail "networkPolicy.metricsFrom is needed with a monitor: the network policy lets nobody read metrics" }}{{ end -}}
{{- if and .Values.backup.enabled (not $isSet) }}{{ fail "backup is of a StatefulSet's stores" }}{{ end -}}
{{- if and .Values.backup.enabled (ne .Values.tls.mode "none") (not .Values.backup.tlsSecret) }}{{ fail "backup.tlsSecret is needed where the stores speak TLS" }}{{ end -}}
{{- end }}

{{- define "ctxcache.checkFleet" -}}
{{- $fleet := .Values.store.fleet -}}
{{- if not $fleet.bucket -}}
{{- range $name, $given := $fleet }}{{ if $given }}{{ fail (printf "store.fleet.%s is of a fleet: it needs store.fleet.bucket" $name) }}{{ end }}{{ end -}}
{{- else -}}
{{- if hasPrefix "file://" $fleet.bucket }}{{ fail "store.fleet.bucket: file:// is a directory of one machine, and each pod would have its own: stores would never hear of each other. Name a bucket: s3://, gs:// or az://" }}{{ end -}}
{{- if not (regexMatch "^(s3|gs|az)://[^/@?#]+(/[^@?#]*)?$" $fleet.bucket) }}{{ fail "store.fleet.bucket is s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or az://CONTAINER/PREFIX" }}{{ end -}}
{{- if not (or $fleet.secretName $fleet.makeSecret) }}{{ fail "store.fleet.bucket without a secret: name one by store.fleet.secretName, with a key `secret` that all stores of the fleet share (openssl rand -hex 32), or have one made by store.fleet.makeSecret" }}{{ end -}}
{{- if and $fleet.secretName $fleet.makeSecret }}{{ fail "store.fleet.secretName names a secret, and store.fleet.makeSecret makes another one: set one of them" }}{{ end -}}
{{- if and (or $fleet.endpoint $fleet.region) (not (hasPrefix "s3://" $fleet.bucket)) }}{{ fail "store.fleet.endpoint and store.fleet.region are of an s3:// bucket" }}{{ end -}}
{{- if and (ne .Values.tls.mode "none") (not .Values.tls.requireClientCertificate) }}{{ fail "store.fleet with TLS needs tls.requireClientCertificate: stores verify each other's certificates by its ca.crt" }}{{ end -}}
{{- if and (eq .Values.tls.mode "none") (include "ctxcache.tellsApart" .) (not $fleet.tokenSecret) }}{{ fail "store.fleet.tokenSecret is needed: callers are told apart, and without TLS stores have no certificates to show each other (ctxcache token new stores --tenant fleet --role peer)" }}{{ end -}}
{{- end -}}
{{- end }}

{{- define "ctxcache.metricsServerName" -}}
{{ .Values.metrics.tls.serverName | default (printf "%s-metrics.%s.svc" (include "ctxcache.fullname" .) .Release.Namespace) }}
{{- end }}

{{- define "ctxcache.metricsSecretName" -}}
{{- if .Values.metrics.tls.secretName }}{{ .Values.metrics.tls.secretName }}{{ else }}{{ include "ctxcache.tlsSecretName" . }}{{ end -}}
{{- end }}

{{/* A container that gives mounted directories of the node to a pod's user: `owned` are volumes and where they lie. */}}
{{- define "ctxcache.ownHostPaths" -}}
- name: own-host-paths
  image: {{ .image }}
  imagePullPolicy: {{ .pull }}
  command:
    - chown
    - {{ printf "%v:%v" (int64 .security.runAsUser) (int64 (.security.runAsGroup | default .security.runAsUser)) | quote }}
    {{- range .owned }}
    - {{ . }}
    {{- end }}
  securityContext:
    runAsUser: 0
    runAsGroup: 0
    runAsNonRoot: false
    allowPrivilegeEscalation: false
    readOnlyRootFilesystem: true
    capabilities:
      drop: [ALL]
      add: [CHOWN]
  resources:
    requests:
      cpu: 10m
      memory: 16Mi
    limits:
      memory: 64Mi
  volumeMounts:
    {{- range $volume, $path := .owned }}
    - name: {{ $volume }}
      mountPath: {{ $path }}
    {{- end }}
{{- end }}
