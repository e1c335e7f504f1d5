package testdb

import (
	"database/sql"
	"testing"

	"github.com/jackc/pgx/v5"
	"gorm.io/gorm"
	"gorm.io/gorm/logger"
)

// Option says how a pool or a handle is opened.
type Option func(*options)

type options struct {
	poolSize int
	execMode *pgx.QueryExecMode
	params   map[string]string
	gorm     *gorm.Config
}

func newOptions(opts []Option) options {
	o := options{poolSize: 10, params: map[string]string{}}
	for _, opt := range opts {
		opt(&o)
	}
	return o
}

// gormConfig logs nothing unless the test brings its own configuration: many
// tests provoke errors.
func (o options) gormConfig() *gorm.Config {
	if o.gorm != nil {
		return o.gorm
	}
	return &gorm.Config{Logger: logger.Discard}
}

// PoolSize bounds the open connections. Defaults to 10.
func PoolSize(n int) Option { return func(o *options) { o.poolSize = n } }

// ExecMode sets pgx's way of running statements, for example
// pgx.QueryExecModeSimpleProtocol, which is what PreferSimpleProtocol of GORM's
// driver does. SQLite ignores it.
func ExecMode(m pgx.QueryExecMode) Option { return func(o *options) { o.execMode = &m } }

// Param sets a startup parameter of the connections, for example
// application_name. SQLite ignores it.
func Param(name, value string) Option { return func(o *options) { o.params[name] = value } }

// Config is used for the GORM handle as it is. Defaults to one that logs
// nothing.
func Config(c *gorm.Config) Option { return func(o *options) { o.gorm = c } }

func closeAtEnd(t testing.TB, db *sql.DB) {
	t.Cleanup(func() {
		if err := db.Close(); err != nil {
			t.Errorf("close pool: %v", err)
		}
	})
}
