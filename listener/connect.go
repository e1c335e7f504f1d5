package listener

import (
	"context"
	"fmt"
	"net"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// ConnectFunc returns a function for Config.Connect that opens a connection
// to the server of a DSN, in any form that pgx takes. What the DSN leaves open
// is chosen for a connection that idles for days: a connect timeout of five
// seconds, TCP keepalive, only the primary of several hosts, and an
// application_name that ends with "outbox-listener".
func ConnectFunc(dsn string) (func(context.Context) (*pgx.Conn, error), error) {
	config, err := pgx.ParseConfig(dsn)
	if err != nil {
		return nil, fmt.Errorf("parse the listener's DSN: %w", err)
	}
	if config.ConnectTimeout == 0 {
		config.ConnectTimeout = 5 * time.Second
	}
	if config.ValidateConnect == nil {
		// A standby takes the connection and refuses to LISTEN.
		config.ValidateConnect = pgconn.ValidateConnectTargetSessionAttrsPrimary
	}
	config.DialFunc = (&net.Dialer{
		Timeout:         config.ConnectTimeout,
		KeepAliveConfig: net.KeepAliveConfig{Enable: true, Idle: 15 * time.Second, Interval: 5 * time.Second, Count: 3},
	}).DialContext
	config.RuntimeParams["application_name"] = applicationName(config.RuntimeParams["application_name"])
	// Prepared statements would serve nothing here, and fail behind a pooler.
	config.DefaultQueryExecMode = pgx.QueryExecModeSimpleProtocol
	config.StatementCacheCapacity, config.DescriptionCacheCapacity = 0, 0

	return func(ctx context.Context) (*pgx.Conn, error) {
		return pgx.ConnectConfig(ctx, config) // copies the config
	}, nil
}

// applicationName marks the connection for people who look at
// pg_stat_activity, within the 63 bytes that Postgres keeps.
func applicationName(application string) string {
	const suffix = "outbox-listener"
	if application == "" {
		return suffix
	}
	return application[:min(len(application), 63-len(suffix)-1)] + " " + suffix
}
