package gormoutbox_test

import (
	"database/sql"
	"fmt"
	"slices"
	"testing"
	"time"

	"gorm.io/gorm"
	"gorm.io/plugin/dbresolver"

	"github.com/gormoutbox/outbox/gormoutbox"
)

// plugin installs the way an outbox does.
type plugin struct {
	initialized int
}

func (*plugin) Name() string { return "test" }

func (p *plugin) Initialize(db *gorm.DB) error {
	p.initialized++
	return gormoutbox.Install(db)
}

// cluster is three databases, each with one row that bears its name.
type cluster struct {
	db                       *gorm.DB
	primary, source, replica *sql.DB
}

// newCluster installs dbresolver and install in an order.
func newCluster(t *testing.T, b *bench, sources, resolverFirst bool, install func(*gorm.DB) error) *cluster {
	t.Helper()
	db := b.bare(gorm.Config{})
	primary, err := db.DB()
	if err != nil {
		t.Fatal(err)
	}
	source, sourcePool := b.other(t)
	replica, replicaPool := b.other(t)
	c := &cluster{primary: primary, source: sourcePool, replica: replicaPool}
	for name, pool := range map[string]*sql.DB{"primary": primary, "source": sourcePool, "replica": replicaPool} {
		for _, query := range []string{
			"CREATE TABLE rows (id integer, name text)", "CREATE TABLE hookeds (id integer, name text)",
			fmt.Sprintf("INSERT INTO rows (name) VALUES ('%s')", name),
		} {
			if _, err := pool.ExecContext(t.Context(), query); err != nil {
				t.Fatal(err)
			}
		}
	}
	config := dbresolver.Config{Replicas: []gorm.Dialector{replica}}
	if sources {
		config.Sources = []gorm.Dialector{source}
	}
	dr := dbresolver.Register(config).SetMaxOpenConns(3).SetMaxIdleConns(3).
		SetConnMaxLifetime(time.Hour).SetConnMaxIdleTime(time.Hour)
	steps := []func(*gorm.DB) error{install, func(db *gorm.DB) error { return db.Use(dr) }}
	if resolverFirst {
		slices.Reverse(steps)
	}
	for _, step := range steps {
		if err := step(db); err != nil {
			t.Fatal(err)
		}
	}
	if n := replicaPool.Stats().MaxOpenConnections; n != 3 {
		t.Errorf("the replica has %d connections, want the 3 that dbresolver set", n)
	}
	c.db = b.use(db)
	return c
}

// rows lists the names of rows by a way past GORM.
func rows(t *testing.T, db *sql.DB) (list []string) {
	t.Helper()
	result, err := db.QueryContext(t.Context(), "SELECT name FROM rows ORDER BY name")
	if err != nil {
		t.Fatal(err)
	}
	defer result.Close()
	for result.Next() {
		var name string
		if err := result.Scan(&name); err != nil {
			t.Fatal(err)
		}
		list = append(list, name)
	}
	if err := result.Err(); err != nil {
		t.Fatal(err)
	}
	return list
}

func onEachCluster(t *testing.T, test func(t *testing.T, b *bench, sources bool, c *cluster)) {
	t.Helper()
	use := func(db *gorm.DB) error { return db.Use(&plugin{}) }
	for what, install := range map[string]func(*gorm.DB) error{"install": gormoutbox.Install, "plugin": use} {
		for _, first := range []bool{false, true} {
			for _, sources := range []bool{false, true} {
				t.Run(fmt.Sprintf("%s, resolver first %t, sources %t", what, first, sources), func(t *testing.T) {
					t.Parallel()
					onEach(t, func(t *testing.T, b *bench) {
						test(t, b, sources, newCluster(t, b, sources, first, install))
					})
				})
			}
		}
	}
}

func TestTransactionsWithDBResolver(t *testing.T) {
	t.Parallel()
	onEachCluster(t, func(t *testing.T, b *bench, sources bool, c *cluster) {
		var calls calls
		inside := func(name string) func(*gorm.DB) error {
			return func(tx *gorm.DB) error { calls.add(t, tx, name); return nil }
		}
		begin := func(name string, tx *gorm.DB) {
			calls.add(t, tx, name)
			if err := tx.Commit().Error; err != nil {
				t.Error(err)
			}
		}
		if err := c.db.Transaction(inside("1")); err != nil {
			t.Error(err)
		}
		begin("2", c.db.Begin())
		begin("3", c.db.Clauses(dbresolver.Write).Begin())
		begin("4", c.db.Clauses(dbresolver.Read).Begin())
		if err := c.db.Clauses(dbresolver.Write).Transaction(inside("5")); err != nil {
			t.Error(err)
		}
		if err := c.db.Omit("ID").Create(&Hooked{add: inside("6")}).Error; err != nil {
			t.Error(err)
		}
		rolledBack := c.db.Clauses(dbresolver.Write).Begin()
		calls.add(t, rolledBack, "7")
		rolledBack.Rollback()
		calls.want(t, "1", "2", "3", "4", "5", "6")

		primary, source := []string{"1", "2", "3", "5", "6", "primary"}, []string{"source"}
		if sources {
			primary, source = []string{"1", "2", "primary"}, []string{"3", "5", "6", "source"}
		}
		for db, want := range map[*sql.DB][]string{c.primary: primary, c.source: source, c.replica: {"4", "replica"}} {
			if got := rows(t, db); !slices.Equal(got, want) {
				t.Errorf("rows %q, want %q", got, want)
			}
		}
	})
}

// What dbresolver does outside transactions is the same as ever.
func TestStatementsWithDBResolver(t *testing.T) {
	t.Parallel()
	onEachCluster(t, func(t *testing.T, b *bench, sources bool, c *cluster) {
		written := "primary"
		if sources {
			written = "source"
		}
		for i, db := range []*gorm.DB{c.db, c.db.Session(&gorm.Session{SkipDefaultTransaction: true})} {
			var row Row
			read := func(what, want string, db *gorm.DB) {
				if db.Error != nil || row.Name != want {
					t.Errorf("%s read %q (%v), want %q", what, row.Name, db.Error, want)
				}
				row = Row{}
			}
			read("Take", "replica", db.Take(&row))
			read("Raw", "replica", db.Raw("SELECT name FROM rows").Scan(&row))
			read("Take for writing", written, db.Clauses(dbresolver.Write).Where("name = ?", written).Take(&row))

			name := fmt.Sprint("new ", i)
			if err := db.Omit("ID").Create(&Row{Name: name}).Error; err != nil {
				t.Error(err)
			}
			if err := db.Exec("UPDATE rows SET name = ? WHERE name = ?", name+"!", name).Error; err != nil {
				t.Error(err)
			}
			if err := db.Model(&Row{}).Where("name = ?", name+"!").Update("name", name+"?").Error; err != nil {
				t.Error(err)
			}
			read("Take what was written", name+"?", db.Clauses(dbresolver.Write).Where("name = ?", name+"?").Take(&row))
			if err := db.Where("name = ?", name+"?").Delete(&Row{}).Error; err != nil {
				t.Error(err)
			}
		}
		for _, db := range []*sql.DB{c.primary, c.source, c.replica} {
			if got := rows(t, db); len(got) != 1 {
				t.Errorf("rows %q, want that of the beginning", got)
			}
		}
		if pool, err := gormoutbox.Primary(c.db.Clauses(dbresolver.Read)); pool != c.primary || err != nil {
			t.Errorf("Primary is not that of gorm.Open (%v)", err)
		}
	})
}

// dbresolver opens its pools with the plugins of the first, and limits those
// that it was given.
func TestDBResolverInitializesAgain(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, b *bench) {
		db := b.bare(gorm.Config{})
		p := &plugin{}
		if err := db.Use(p); err != nil {
			t.Fatal(err)
		}
		pool := db.ConnPool
		replica, _ := b.other(t)
		dr := dbresolver.Register(dbresolver.Config{Replicas: []gorm.Dialector{replica}})
		if err := db.Use(dr); err != nil {
			t.Fatal(err)
		}
		if p.initialized != 2 {
			t.Errorf("initialized %d times, want 2", p.initialized)
		}
		if db.ConnPool != pool {
			t.Error("the first pool was wrapped again")
		}
		log := newRecorder()
		dr.DB = db.Session(&gorm.Session{Logger: log})
		dr.SetMaxOpenConns(4).SetMaxIdleConns(4).SetConnMaxLifetime(time.Hour).SetConnMaxIdleTime(time.Hour)
		if len(log.errors) != 0 {
			t.Errorf("dbresolver says %q", log.errors)
		}
		if raw, err := db.DB(); err != nil || raw.Stats().MaxOpenConnections != 4 {
			t.Errorf("the limit does not hold (%v)", err)
		}
	})
}
