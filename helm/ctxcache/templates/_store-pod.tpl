{{- define "ctxcache.storePod" -}}
metadata:
  labels:
    {{- include "ctxcache.storeSelector" . | nindent 4 }}
    {{- include "ctxcache.labels" . | nindent 4 }}
    {{- with .Values.store.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  annotations:
    # A changed setting is a new pod.
    checksum/settings: {{ include "ctxcache.settings" . | sha256sum }}
    {{- with .Values.store.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  serviceAccountName: {{ include "ctxcache.serviceAccountName" . }}
  automountServiceAccountToken: false
  enableServiceLinks: false
  {{- with .Values.image.pullSecrets }}
  imagePullSecrets:
    {{- range . }}
    - name: {{ . }}
    {{- end }}
  {{- end }}
  securityContext:
    {{- toYaml .Values.store.podSecurityContext | nindent 4 }}
  terminationGracePeriodSeconds: {{ include "ctxcache.graceSeconds" . }}
  {{- with .Values.store.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- with .Values.store.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.store.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.store.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- if eq .Values.store.kind "StatefulSet" }}
  topologySpreadConstraints:
    {{- if .Values.store.topologySpreadConstraints }}
    {{- toYaml .Values.store.topologySpreadConstraints | nindent 4 }}
    {{- else }}
    - maxSkew: 1
      topologyKey: kubernetes.io/hostname
      whenUnsatisfiable: ScheduleAnyway
      labelSelector:
        matchLabels:
          {{- include "ctxcache.storeSelector" . | nindent 10 }}
    {{- end }}
  {{- end }}
  {{- $isDaemonSet := eq .Values.store.kind "DaemonSet" }}
  {{- $owned := dict }}
  {{- if and .Values.store.ownHostPaths .Values.store.podSecurityContext.runAsUser }}
  {{- if .Values.store.shareWithNode.enabled }}
  {{- $_ := set $owned "sockets" "/run/ctxcache" }}
  {{- end }}
  {{- if $isDaemonSet }}
  {{- $_ := set $owned "data" "/var/lib/ctxcache" }}
  {{- range .Values.store.ssd }}
  {{- $_ := set $owned (printf "ssd-%s" .name) (printf "/var/lib/ctxcache-ssd/%s" .name) }}
  {{- end }}
  {{- end }}
  {{- end }}
  {{- if or $owned .Values.store.initContainers }}
  initContainers:
    {{- if $owned }}
    {{- include "ctxcache.ownHostPaths" (dict "image" (include "ctxcache.image" .) "pull" .Values.image.pullPolicy "security" .Values.store.podSecurityContext "owned" $owned) | nindent 4 }}
    {{- end }}
    {{- with .Values.store.initContainers }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- end }}
  containers:
    - name: store
      image: {{ include "ctxcache.image" . }}
      imagePullPolicy: {{ .Values.image.pullPolicy }}
      {{- if .Values.store.fleet.bucket }}
      args: [serve, --output, json, {{ printf "--fleet-address=$(POD_IP):%v" .Values.service.port | quote }}]
      {{- else }}
      args: [serve, --output, json]
      {{- end }}
      env:
        - name: CTXCACHE_CONFIG
          value: /etc/ctxcache/ctxcache.toml
        {{- if .Values.store.fleet.bucket }}
        - name: POD_IP
          valueFrom:
            fieldRef:
              fieldPath: status.podIP
        {{- with .Values.store.fleet.endpoint }}
        - name: AWS_ENDPOINT_URL
          value: {{ . | quote }}
        {{- end }}
        {{- with .Values.store.fleet.region }}
        - name: AWS_REGION
          value: {{ . | quote }}
        {{- end }}
        {{- end }}
        {{- with .Values.store.extraEnv }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- if or .Values.store.fleet.credentialsSecret .Values.store.extraEnvFrom }}
      envFrom:
        {{- with .Values.store.fleet.credentialsSecret }}
        - secretRef:
            name: {{ . }}
        {{- end }}
        {{- with .Values.store.extraEnvFrom }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- end }}
      ports:
        - name: grpc
          containerPort: {{ .Values.service.port }}
        - name: bulk
          containerPort: {{ .Values.service.bulkPort }}
        - name: metrics
          containerPort: {{ .Values.metrics.port }}
      # A store that opens a million segments takes seconds; one whose metadata are made anew reads its whole SSD tier.
      startupProbe:
        httpGet:
          path: /readyz
          port: metrics
          {{- if .Values.metrics.tls.enabled }}
          scheme: HTTPS
          {{- end }}
        periodSeconds: 5
        failureThreshold: {{ div .Values.store.startSeconds 5 }}
      {{- if eq .Values.tls.mode "none" }}
      readinessProbe:
        grpc:
          port: {{ .Values.service.port }}
        periodSeconds: 5
        timeoutSeconds: 3
      {{- else }}
      # The kubelet's gRPC probe speaks no TLS.
      readinessProbe:
        httpGet:
          path: /readyz
          port: metrics
          {{- if .Values.metrics.tls.enabled }}
          scheme: HTTPS
          {{- end }}
        periodSeconds: 5
        timeoutSeconds: 3
      {{- end }}
      livenessProbe:
        httpGet:
          path: /healthz
          port: metrics
          {{- if .Values.metrics.tls.enabled }}
          scheme: HTTPS
          {{- end }}
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: 6
      lifecycle:
        preStop:
          sleep:
            seconds: {{ .Values.store.preStopSleepSeconds }}
      securityContext:
        {{- toYaml .Values.store.containerSecurityContext | nindent 8 }}
      resources:
        {{- $memory := ternary (int64 .Values.store.memoryOverheadMiB) (add .Values.store.arena.sizeMiB .Values.store.memoryOverheadMiB) .Values.store.arena.hugePages }}
        requests:
          cpu: {{ .Values.store.cpu.request | quote }}
          memory: {{ $memory }}Mi
        limits:
          {{- with .Values.store.cpu.limit }}
          cpu: {{ . | quote }}
          {{- end }}
          memory: {{ $memory }}Mi
          {{- if .Values.store.arena.hugePages }}
          hugepages-2Mi: {{ int64 .Values.store.arena.sizeMiB }}Mi
          {{- end }}
      volumeMounts:
        - name: settings
          mountPath: /etc/ctxcache
          readOnly: true
        - name: data
          mountPath: /var/lib/ctxcache
        {{- range .Values.store.ssd }}
        - name: ssd-{{ .name }}
          mountPath: /var/lib/ctxcache-ssd/{{ .name }}
        {{- end }}
        - name: arena
          mountPath: /dev/shm
        - name: sockets
          mountPath: /run/ctxcache
        - name: tmp
          mountPath: /tmp
        {{- if ne .Values.tls.mode "none" }}
        - name: tls
          mountPath: /etc/ctxcache-tls
          readOnly: true
        {{- end }}
        {{- if .Values.auth.tokenHashesSecret }}
        - name: tokens
          mountPath: /etc/ctxcache-tokens
          readOnly: true
        {{- end }}
        {{- if .Values.store.fleet.bucket }}
        - name: fleet
          mountPath: /etc/ctxcache-fleet
          readOnly: true
        {{- end }}
        {{- if .Values.store.fleet.tokenSecret }}
        - name: fleet-token
          mountPath: /etc/ctxcache-fleet-token
          readOnly: true
        {{- end }}
        {{- if and .Values.metrics.tls.enabled .Values.metrics.tls.secretName }}
        - name: metrics-tls
          mountPath: /etc/ctxcache-metrics-tls
          readOnly: true
        {{- end }}
        {{- if .Values.metrics.tokenSecret }}
        - name: metrics-token
          mountPath: /etc/ctxcache-metrics-token
          readOnly: true
        {{- end }}
        {{- with .Values.store.extraVolumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
    {{- with .Values.store.extraContainers }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  volumes:
    - name: settings
      configMap:
        name: {{ include "ctxcache.fullname" . }}
    - name: arena
      emptyDir:
        medium: Memory
        {{- if .Values.store.arena.hugePages }}
        sizeLimit: 16Mi
        {{- else }}
        # The arena's file and room for its neighbours; it is allocated whole, or the store does not start.
        sizeLimit: {{ add .Values.store.arena.sizeMiB 64 }}Mi
        {{- end }}
    - name: sockets
      {{- if .Values.store.shareWithNode.enabled }}
      hostPath:
        path: {{ .Values.store.shareWithNode.hostPath }}
        type: DirectoryOrCreate
      {{- else }}
      emptyDir:
        sizeLimit: 1Mi
      {{- end }}
    - name: tmp
      emptyDir:
        sizeLimit: 64Mi
    {{- if ne .Values.tls.mode "none" }}
    - name: tls
      secret:
        secretName: {{ include "ctxcache.tlsSecretName" . }}
        defaultMode: 0440
    {{- end }}
    {{- with .Values.auth.tokenHashesSecret }}
    - name: tokens
      secret:
        secretName: {{ . }}
        defaultMode: 0440
    {{- end }}
    {{- if .Values.store.fleet.bucket }}
    - name: fleet
      secret:
        secretName: {{ include "ctxcache.fleetSecretName" . }}
        defaultMode: 0440
    {{- end }}
    {{- with .Values.store.fleet.tokenSecret }}
    - name: fleet-token
      secret:
        secretName: {{ . }}
        defaultMode: 0440
    {{- end }}
    {{- if and .Values.metrics.tls.enabled .Values.metrics.tls.secretName }}
    - name: metrics-tls
      secret:
        secretName: {{ .Values.metrics.tls.secretName }}
        defaultMode: 0440
    {{- end }}
    {{- with .Values.metrics.tokenSecret }}
    - name: metrics-token
      secret:
        secretName: {{ . }}
        defaultMode: 0440
    {{- end }}
    {{- with .Values.store.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
    {{- if eq .Values.store.kind "StatefulSet" }}
    {{- with .Values.store.data.existingClaim }}
    - name: data
      persistentVolumeClaim:
        claimName: {{ . }}
    {{- end }}
    {{- range .Values.store.ssd }}
    {{- if .existingClaim }}
    - name: ssd-{{ .name }}
      persistentVolumeClaim:
        claimName: {{ .existingClaim }}
    {{- end }}
    {{- end }}
    {{- end }}
    {{- if eq .Values.store.kind "DaemonSet" }}
    - name: data
      hostPath:
        path: {{ .Values.store.data.hostPath }}
        type: DirectoryOrCreate
    {{- range .Values.store.ssd }}
    - name: ssd-{{ .name }}
      hostPath:
        path: {{ required (printf "store.ssd: %s has no hostPath, which a DaemonSet needs" .name) .hostPath }}
        type: Directory
    {{- end }}
    {{- end }}
{{- end }}
